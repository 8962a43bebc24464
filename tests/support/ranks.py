"""Ranks that compute a network together on this machine: processes, or threads."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.executor.parallel import Shard, add_all_reduce, local_architecture
from flambeau.llm.quantize.quantizer import build

T = TypeVar("T")


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on at present."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [probe.getsockname()[1] for probe in probes]


def start_ranks(folder: Path, size: int, script: str, given: object) -> list[subprocess.Popen[bytes]]:
    """The processes; each runs the script with the folder, the number of ranks and what is given, as JSON."""
    [port] = free_ports(1)
    command = [sys.executable, "-W", "ignore", "-c", script, str(folder), str(size), json.dumps(given)]
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return [
        subprocess.Popen(command, env={**os.environ, **paths, **meeting, "RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(size)
    ]


def run_ranks(folder: Path, size: int, script: str, given: object, timeout_s: float = 100) -> list[object]:
    """The lines that rank 0 prints; every rank must end well."""
    ranks = start_ranks(folder, size, script, given)
    try:
        outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size
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
