"""Ranks that compute a network together on this machine: processes, or threads."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.executor.shard import Shard, add_all_reduce, local_architecture
from flambeau.llm.quantize.quantizer import build
from flambeau.testing.server import free_ports
from support import rank_process

T = TypeVar("T")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["support.site.sitecustomize", "flambeau.llm.loader", "support.rank_process"])


class Rank:
    """A process that runs a script. It is a fork of one that has imported the engine, so it starts at once."""

    def __init__(self, script: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115
        start_fork_server()
        given = (script, arguments, {**os.environ, **environment}, self._output.name)
        self._process = FORKS.Process(target=rank_process.run, args=given, daemon=True)
        self._process.start()

    def wait(self, timeout_s: float) -> str:
        """What it printed, once it has ended; raises TimeoutError."""
        self._process.join(timeout_s)
        if self._process.is_alive():
            raise TimeoutError(f"a rank did not end within {timeout_s:g} s")
        return self.output

    @property
    def output(self) -> str:
        """What it has printed."""
        return Path(self._output.name).read_text()

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._output.close()


def start_fork_server() -> None:
    """Start the process whose forks are ranks, unless it runs."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}  # a fork has one thread
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def start_ranks(folder: Path, size: int, script: str, given: object) -> list[Rank]:
    """The processes; each runs the script with the folder, the number of ranks and what is given, as JSON."""
    [port] = free_ports(1)
    arguments = [str(folder), str(size), json.dumps(given)]
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [Rank(script, arguments, {**meeting, "RANK": str(rank)}) for rank in range(size)]


def run_ranks(folder: Path, size: int, script: str, given: object, timeout_s: float = 100) -> list[object]:
    """The lines that rank 0 prints; every rank must end well."""
    ranks = start_ranks(folder, size, script, given)
    deadline = time.monotonic() + timeout_s
    try:
        # When one fails, the others may wait for it until their own limit.
        while any(rank.exit_code is None for rank in ranks) and not any(rank.exit_code for rank in ranks):
            if time.monotonic() > deadline:
                raise TimeoutError(f"a rank did not end within {timeout_s:g} s")
            time.sleep(0.05)
        assert [rank.exit_code for rank in ranks] == [0] * size, [rank.output for rank in ranks]
        outputs = [rank.output for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads(line) for line in outputs[0].splitlines()]


def run_as_threads(monkeypatch: pytest.MonkeyPatch, compute: Callable[[int], T], size: int = 2) -> list[T]:
    """What each rank computes, where ranks are threads of this process; sums over ranks are sums over threads."""
    meeting = threading.Barrier(size, timeout=60)
    own, parts, found = threading.local(), {}, {}

    def all_reduce(y: Tensor, group: object = None) -> None:
        parts[own.rank] = y.clone()
        meeting.wait()
        y.copy_(sum(parts[rank] for rank in range(size)))
        meeting.wait()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)

    def run(rank: int) -> None:
        own.rank = rank
        try:
            found[rank] = compute(rank)
        finally:
            if rank not in found:
                meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


def logits_in_threads(path: Path, size: int, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits that each rank of a checkpoint's plain network finds."""
    arch = read_architecture(path)

    def compute(rank: int) -> Tensor:
        shard = Shard(arch, rank, size)
        model = load_model(
            path, dtype=torch.float32, build=lambda _: build(local_architecture(arch, size)), shard=shard
        )
        add_all_reduce(model, shard)
        with torch.inference_mode():
            return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), WholeAttention()))

    return run_as_threads(monkeypatch, compute, size)
