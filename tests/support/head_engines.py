"""Engines of checkpoints in files, and what their heads propose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flambeau.llm.config import EngineConfig
from flambeau.llm.engine import Engine
from flambeau.llm.network_loader import load_network


def head_engine(folder: Path, config: EngineConfig) -> Engine:
    """The engine of a checkpoint, as soon as its kernels are there."""
    loaded = load_network(folder, config, torch.device("cpu"), None)
    loaded.backend.wait_until_compiled(timeout_s=250)
    return Engine(
        *(loaded.arch, loaded.backend),
        num_blocks=loaded.num_blocks,
        state_cache=loaded.state_cache,
        config=loaded.config,
        draft=loaded.draft,
    )


@contextmanager
def recorded_proposals(engine: Engine) -> Iterator[list[tuple[list[int], list[int]]]]:
    """The tokens of sequences, and what the head has proposed after them."""
    proposer, found = engine._executor._speculator._proposer._other, []
    propose = proposer.propose

    def recorded(sequences, limits, num_ahead):
        proposal = propose(sequences, limits, num_ahead)
        if proposal is not None:
            rows = zip(sequences, proposal.ids_SK.tolist(), proposal.lengths, strict=True)
            found.extend(([*s.tokens], ids[:length]) for s, ids, length in rows if length)
        return proposal

    proposer.propose = recorded
    yield found
    proposer.propose = propose


@dataclass(frozen=True)
class HeadRun:
    """What a head has proposed for greedy texts: the tokens before, and the proposals."""

    kind: str | None
    rounds: list[tuple[list[int], list[int]]]
    num_preempted: int


def run_with_head(folder: Path, config: EngineConfig, **head: Any) -> HeadRun:
    """Texts are those without the head, after prompts, prefixes and rejected tokens, greedy and with a seed."""
    shared = [*range(10, 29)]
    prompts = [[7, 8, 9, 10, 11] * 3, [5, 6], [*shared, 4, 5], [*shared, 9], [*shared[:12], 1]]
    greedy = {"temperature": 0.0, "max_tokens": 14, "ignore_eos": True}
    plain, engine = (head_engine(folder, each) for each in (config, replace(config, **head)))
    expected = [each for _ in range(2) for each in plain.generate(prompts, **greedy)]
    with recorded_proposals(engine) as rounds:
        found = [each for _ in range(2) for each in engine.generate(prompts, **greedy)]
    sampled = {**greedy, "temperature": 0.8}
    expected += plain.generate(prompts, **sampled, seed=5)
    found += engine.generate(prompts, **sampled, seed=5)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    found += engine.generate(prompts, **sampled)
    assert all(sum(each.counts.num_drafted for each in found[i : i + 5]) > 0 for i in range(0, len(found), 5))
    plain.close()
    engine.close()
    different = dict.fromkeys((tuple(tokens), tuple(ids)) for tokens, ids in rounds)  # greedy texts come twice
    return HeadRun(
        engine.info.speculation, [([*tokens], [*ids]) for tokens, ids in different], engine.state.num_preempted
    )
