"""Ranks as processes, which compute a network together on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path


def start_ranks(folder: Path, size: int, script: str, given: object) -> list[subprocess.Popen[bytes]]:
    """The processes; each runs the script with the folder, the number of ranks and what is given, as JSON."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
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
