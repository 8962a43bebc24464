"""Making a speculator, as the configuration asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from flambeau.llm.compute.forward import Forward
from flambeau.llm.compute.runner import Runner
from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import LLMError
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.speculation.draft import DraftProposer
from flambeau.llm.speculation.lookup import LookupProposer
from flambeau.llm.speculation.proposal import Proposer
from flambeau.llm.speculation.repeats import LONG, RepeatsProposer
from flambeau.llm.speculation.speculator import Speculator
from flambeau.llm.speculation.worth import sensible_numbers


@dataclass(frozen=True, slots=True)
class Draft:
    """A smaller network of the same vocabulary, with a cache that has the target's blocks."""

    forward: Forward
    max_length: int


def make_speculator(config: EngineConfig, runner: Runner, sampler: Sampler, draft: Draft | None) -> Speculator | None:
    """What proposes tokens; None: nothing does."""
    kind = config.speculation or ("draft" if draft else None)
    if kind is None or config.speculate_k < 1:
        return None
    if kind == "draft" and draft is None:
        raise LLMError('speculation "draft" needs a draft: a folder with a smaller model of the same vocabulary')
    proposer: Proposer = LookupProposer(sampler.device)
    if kind == "draft" and draft is not None:
        drafting = DraftProposer(
            draft.forward, runner, sampler, max_length=draft.max_length, max_step_tokens=config.max_step_tokens
        )
        proposer = RepeatsProposer(drafting, LookupProposer(sampler.device, shortest=LONG))
    # On a GPU every number of tokens is a graph of its own.
    numbers = sensible_numbers(config.speculate_k) if sampler.device.type == "cpu" else [config.speculate_k, 0]
    return Speculator(proposer, numbers=numbers, max_step_tokens=config.max_step_tokens)
