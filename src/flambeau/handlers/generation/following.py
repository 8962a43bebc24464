"""Following: a rank other than 0 has its part of the network, and computes what rank 0 computes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flambeau.errors import HandlerError
from flambeau.handlers.generation.settings import GptSettings
from flambeau.llm.config import EngineConfig
from flambeau.llm.loader import load_follower
from flambeau.wire.messages import Part, Request


class Following:
    """What the worker of such a rank calls: only `follow`, for it is sent no jobs."""

    places = 1
    abilities: Sequence[str] = ()
    has_work = False

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self._follow = load_follower(path, config)

    def follow(self) -> None:
        """Compute what rank 0 computes, until it says the end."""
        self._follow()

    def join(self, request: Request, row: Mapping[str, Any]) -> None:
        """Jobs are rank 0's."""
        raise NotImplementedError

    def step(self) -> list[Part | tuple[int, Exception]]:
        """Steps are rank 0's."""
        raise NotImplementedError

    def cancel(self, job_id: int) -> None:
        """Nothing is held here."""

    def close(self) -> None:
        """Rank 0 says the end."""


def check_ranks(settings: GptSettings) -> tuple[int, int]:
    """Which rank this is, of how many; the server starts them, so settings that ask for some need a parallelType."""
    wanted, there = settings.tensor_parallel_size or 1, int(os.environ.get("WORLD_SIZE", "1"))
    if wanted > 1 and wanted != there:
        raise HandlerError(
            f"tensor_parallel_size is {wanted}, and this worker has {there} process(es): set parallelType: tp and "
            f"parallelLevel: {wanted} (or torchrun: nproc-per-node: {wanted}) beside the handler section"
        )
    return int(os.environ.get("RANK", "0")), there
