"""Bare loops: the same handler called without a server, in as many processes as the server has workers."""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Self

import machine

SCRIPT = Path(__file__).parent / "bare_loop.py"


class LoopEnded(Exception):
    """A bare loop ended early."""


class BareLoops:
    """Idle processes with a handler; in each turn all of them call it for a given time."""

    def __init__(self, python: Path, archive: Path, body: Path, count: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="flambeau-bench-loop-"))
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(self._folder)
        self._command = [str(python), str(SCRIPT), str(self._folder), str(body)]
        self._count = count
        self._loops: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        for _ in range(self._count):
            self._loops.append(
                subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
                )
            )
        for loop in self._loops:
            self._read(loop)
        return self

    def __exit__(self, *_: object) -> None:
        for loop in self._loops:
            loop.kill()
            loop.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, seconds: float) -> float:
        """Calls per second of all loops together."""
        for loop in self._loops:
            assert loop.stdin
            loop.stdin.write(f"{seconds}\n")
            loop.stdin.flush()
        results = [json.loads(self._read(loop)) for loop in self._loops]
        return float(sum(result["calls"] / result["seconds"] for result in results))

    def processes(self) -> dict[int, machine.Process]:
        """The process ids of the loops."""
        table = machine.process_table()
        return {loop.pid: table[loop.pid] for loop in self._loops if loop.pid in table}

    @staticmethod
    def _read(loop: "subprocess.Popen[str]") -> str:
        assert loop.stdout
        line = loop.stdout.readline()
        if not line:
            raise LoopEnded
        return line
