"""What is measured beside an attack: the latency of the event loop, memory, descriptors, and whose answers arrive."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scorecard.case import Stage
from scorecard.latency import INTERVAL_S
from support.running import RunningServer

LIVEZ_P99_MS = 50
RETURN_SHARE = 0.10  # memory after a case may exceed memory before it by this share


def percentile(values: list[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def waits_during(time_ms: float) -> list[float]:
    """The waits of a request and of those that would have been sent every 10 ms until its answer."""
    return [time_ms - 1000 * INTERVAL_S * i for i in range(max(1, math.ceil(time_ms / (1000 * INTERVAL_S))))]


class LatencyProbe:
    """Asks /livez every 10 ms, on a connection and in a process of its own."""

    def __init__(self, server: RunningServer, port: int | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scorecard.latency", str(port or server.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
        )
        self.times: list[float] = []
        self.delays: list[float] = []  # late wake-ups of the probe: how busy the machine was
        self.num_failures = 0

    def __enter__(self) -> LatencyProbe:
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it is ready
        return self

    def __exit__(self, *_: object) -> None:
        output, _unused = self._process.communicate(timeout=90)
        self.times, self.delays, self.num_failures = json.loads(output)

    @property
    def waits(self) -> list[float]:
        """What requests would have waited that arrive every 10 ms, also while an answer is late."""
        return [wait for time_ms in self.times for wait in waits_during(time_ms)]

    @property
    def p50_ms(self) -> float:
        return percentile(self.waits, 0.5)

    @property
    def p99_ms(self) -> float:
        return percentile(self.waits, 0.99)

    def judge(self, stage: Stage, limit_ms: float = LIVEZ_P99_MS) -> None:
        """The bound that holds beside every attack."""
        stage.at_most("/livez p99", self.p99_ms, limit_ms, "ms")
        stage.note("/livez p50", self.p50_ms, "ms")
        stage.note("/livez slowest", max(self.times, default=0.0), "ms")
        stage.note("the probe itself was late, p99", percentile(self.delays, 0.99), "ms")
        stage.equal("/livez failures", self.num_failures, 0)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process in MB; `shared` are memory files that it holds, mapped or not."""

    rss: float
    pss: float
    anonymous: float
    shared: float

    @property
    def held(self) -> float:
        """What is the process's own: it counts each byte once."""
        return self.anonymous + self.shared

    @classmethod
    def of(cls, pid: int) -> Memory:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        kb = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        anonymous = kb["Anonymous"]
        return cls(kb["Rss"] / 1024, kb["Pss"] / 1024, anonymous / 1024, _memory_files(pid) / 2**20)


def _memory_files(pid: int) -> int:
    total = 0
    folder = Path(f"/proc/{pid}/fd")
    for name in os.listdir(folder):
        try:
            link = os.readlink(folder / name)
            if link.startswith(("/memfd:", "/dev/shm/")):
                total += os.stat(folder / name).st_blocks * 512
        except OSError:
            continue
    return total


class MemoryProbe:
    """Memory of the server process before, at the peak and after."""

    def __init__(self, server: RunningServer) -> None:
        self._pid = server.process.pid
        self.before = self.peak = self.after = Memory.of(self._pid)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemoryProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(0.05):
            try:
                now = Memory.of(self._pid)
            except (OSError, KeyError):
                return
            if now.held > self.peak.held:
                self.peak = now

    def settle(self, timeout_s: float = 10) -> Memory:
        """Wait until the memory is back, or until it is clear that it is not."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.after = Memory.of(self._pid)
            if self.growth <= RETURN_SHARE or time.monotonic() > deadline:
                return self.after
            time.sleep(0.2)

    @property
    def growth(self) -> float:
        return self.after.rss / self.before.rss - 1

    def judge(self, stage: Stage, *, peak_mb: float | None, returns: bool = True) -> None:
        """Memory is bounded during the attack (if `peak_mb` is given), and back after it if the attack is over."""
        if returns:
            self.settle()
        stage.note("memory before (RSS)", self.before.rss, "MB")
        stage.note("memory before (PSS)", self.before.pss, "MB")
        held = self.peak.held - self.before.held
        if peak_mb is None:
            stage.note("more memory at the peak", held, "MB")
        else:
            stage.at_most("more memory at the peak", held, peak_mb, "MB")
        if returns:
            stage.note("memory after (RSS)", self.after.rss, "MB")
            stage.note("memory after (PSS)", self.after.pss, "MB")
            stage.at_most("memory growth", round(100 * self.growth, 1), 100 * RETURN_SHARE, "%")


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


MARK = "SCORECARD_RUN"  # in the environment of every process that a run starts


def is_ours(pid: int) -> bool:
    """Whether this run has started a process: it carries the mark of the run."""
    mark = os.environ.get(MARK)
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return bool(mark) and f"{MARK}={mark}".encode() in environment.split(b"\0")


def wait_for(condition: Callable[[], Any], timeout_s: float = 20) -> float | None:
    """Seconds until a condition holds; None if it does not within the limit."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        if condition():
            return time.monotonic() - began
        time.sleep(0.01)
    return None


@dataclass(slots=True)
class Tally:
    """What became of the requests of an OwnAnswersClient."""

    answered: int = 0
    refused: dict[int, int] = field(default_factory=dict)  # by status: an answer too, and its own
    crossed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # accepted, and never answered
    first_refusals: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # milliseconds of good answers

    @property
    def total(self) -> int:
        return self.answered + sum(self.refused.values()) + len(self.crossed) + len(self.lost)


class OwnAnswersClient:
    """Sends requests with unique ids and bodies to an echo model, and checks that every answer is its own."""

    def __init__(
        self,
        server: RunningServer,
        model: str = "echo",
        connections: int = 8,
        *,
        pause_s: float = 0.0,
        timeout_s: float = 60,
        large_every: int = 50,
        prefix: str = "own",
    ) -> None:
        self.tally = Tally()
        self._address = ("127.0.0.1", server.port)
        self._model, self._connections, self._pause_s = model, connections, pause_s
        self._timeout_s, self._large_every, self._prefix = timeout_s, large_every, prefix
        self._numbers = itertools.count()
        self._is_over = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> OwnAnswersClient:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    def judge(self, stage: Stage, *, refusals: bool = True) -> None:
        """No answer is lost or crossed; with `refusals` an error status is an answer too."""
        tally = self.tally
        stage.note("requests", tally.total)
        stage.none("crossed answers", tally.crossed)
        stage.none("lost answers", tally.lost)
        num_refused = sum(tally.refused.values())
        kinds = ", ".join(f"{count} × {status}" for status, count in sorted(tally.refused.items()))
        if refusals:
            stage.note("answered with an error", kinds or "0")
        else:
            stage.none("answered with an error", tally.first_refusals[:3] + [""] * (num_refused - 3))

    async def _run(self) -> None:
        await asyncio.gather(*(self._ask_again_and_again() for _ in range(self._connections)))

    async def _ask_again_and_again(self) -> None:
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while not self._is_over:
            number = next(self._numbers)
            word = f"{self._prefix}-{number:09d}"
            try:
                streams = streams or await asyncio.open_connection(*self._address, limit=1 << 24)
            except OSError as error:
                self.tally.lost.append(f"{word}: cannot connect: {error}")
                await asyncio.sleep(0.05)
                continue
            try:
                keeps = await asyncio.wait_for(self._ask(*streams, number, word), self._timeout_s)
            except (OSError, ValueError, asyncio.IncompleteReadError, TimeoutError) as error:
                self.tally.lost.append(f"{word}: {type(error).__name__} {error}")
                keeps = False
            if not keeps:
                streams[1].close()
                streams = None
            if self._pause_s:
                await asyncio.sleep(self._pause_s)
        if streams is not None:
            streams[1].close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int, word: str) -> bool:
        is_large = self._large_every and number % self._large_every == 0
        body = (word * (20_000 if is_large else 1)).encode()  # a large one goes through shared memory
        began = time.perf_counter()
        head = f"POST /predictions/{self._model} HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {word}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (one.partition(":") for one in lines[1:])}
        answer = await reader.readexactly(int(headers["content-length"]))
        status = int(lines[0].split()[1])
        owner = headers.get("x-request-id")
        if owner != word:
            self.tally.crossed.append(f"{word} got the answer of {owner}")
        elif status != 200:
            self.tally.refused[status] = self.tally.refused.get(status, 0) + 1
            if len(self.tally.first_refusals) < 3:
                self.tally.first_refusals.append(f"{status} {answer[:300].decode(errors='replace')}")
        elif json.loads(answer)["row"]["body"] != ["bytearray", body.decode()]:
            self.tally.crossed.append(f"{word} got another body: {answer[:80]!r}")
        else:
            self.tally.answered += 1
            self.tally.times.append(1000 * (time.perf_counter() - began))
        return headers.get("connection", "").lower() != "close"
