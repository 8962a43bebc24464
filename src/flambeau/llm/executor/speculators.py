"""make_speculator: the proposer that a configuration asks for, and how many tokens it may propose."""

from __future__ import annotations

from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import LLMError
from flambeau.llm.executor.assistant import AssistantProposer
from flambeau.llm.executor.block_proposer import BlockProposer
from flambeau.llm.executor.draft import DraftModel, DraftProposer
from flambeau.llm.executor.head import HeadModel, HeadProposer
from flambeau.llm.executor.inputs import InputBuilder
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.speculation.adaptive_k import candidate_numbers
from flambeau.llm.speculation.ngram import LONG_REPEAT, NgramFirstProposer, NgramProposer
from flambeau.llm.speculation.speculator import Proposer, Speculator


def make_speculator(
    config: EngineConfig, inputs: InputBuilder, sampler: Sampler, draft: DraftModel | HeadModel | None
) -> Speculator | None:
    """The speculator that the configuration asks for; None for no speculation."""
    kind = config.speculation or ("draft" if draft else None)
    if kind is None or config.speculate_k < 1:
        return None
    if kind == "draft" and draft is None:
        raise LLMError('speculation "draft" needs a draft: a folder with a smaller model of the same vocabulary')
    if kind == "mtp" and not isinstance(draft, HeadModel):
        raise LLMError('speculation "mtp" needs a checkpoint with a layer of multi-token prediction')
    proposer: Proposer = NgramProposer(sampler.device)
    if draft is not None and kind != "lookup":
        proposer = NgramFirstProposer(
            make_proposer(draft, inputs, sampler, config), NgramProposer(sampler.device, min_match=LONG_REPEAT)
        )
    # On a GPU every number of tokens needs a CUDA graph of its own.
    numbers = candidate_numbers(config.speculate_k) if sampler.device.type == "cpu" else [config.speculate_k, 0]
    return Speculator(proposer, numbers=numbers, max_step_tokens=config.max_step_tokens)


def make_proposer(
    draft: DraftModel | HeadModel, inputs: InputBuilder, sampler: Sampler, config: EngineConfig
) -> Proposer:
    if isinstance(draft, HeadModel):
        if draft.head.settings.kind == "assistant":
            return AssistantProposer(draft, inputs, sampler)
        if draft.head.settings.kind == "dflash":
            return BlockProposer(draft, inputs, sampler)
        return HeadProposer(draft, inputs, sampler)
    return DraftProposer(draft, inputs, sampler, max_step_tokens=config.max_step_tokens)


def num_recomputed_blocks(config: EngineConfig, draft: DraftModel | HeadModel | None) -> int:
    """Blocks at the end of a cached prefix that a sequence computes itself.

    A head reads the token after each of its own, so what it keeps at the end of a prefix may belong to another text;
    and it lacks what was generated in the last step. Assistants keep nothing, and DFlash heads nothing of that kind.
    """
    if not isinstance(draft, HeadModel) or config.speculate_k < 1:
        return 0
    if draft.head.settings.kind in ("assistant", "dflash"):
        return 0
    return -(-(config.speculate_k + draft.head.settings.num_depths) // config.block_size)
