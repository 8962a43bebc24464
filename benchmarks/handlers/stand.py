"""What the experiments share: packing a model, a server under load, the same handler without a server."""

import http.client
import io
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flambeau.archive.pack import Recipe, pack

MODELS = Path(__file__).parent / "models"
HOST = "127.0.0.1"


def pack_model(
    folder: Path, name: str, *, handler: str, net: str, weights: Path | None, config: str = "", copied: bool = False
) -> Path:
    """An archive of one of the models in `models`; the config is a model-config.yaml."""
    settings = folder / f"{name}.yaml"
    settings.write_text(config or "{}")
    own = MODELS / f"{handler}.py"
    recipe = Recipe(
        model_name=name,
        handler=str(own) if own.is_file() else handler,
        model_file=None if copied else MODELS / f"{net}.py",
        serialized_file=weights,
        config_file=settings,
    )
    return pack(recipe, folder, format="zip-store", force=True)


def photo(seed: int = 0) -> bytes:
    """A JPEG of 640 × 480 that is neither flat nor noise."""
    import numpy
    from PIL import Image

    y, x = numpy.mgrid[0:480, 0:640]
    noise = numpy.random.default_rng(seed).normal(0, 12, (480, 640, 3))
    waves = numpy.stack([128 + 90 * numpy.sin((x + seed) / f + y / (f + 9)) for f in (31, 47, 67)], axis=2)
    buffer = io.BytesIO()
    Image.fromarray((waves + noise).clip(0, 255).astype("uint8")).save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


@dataclass(frozen=True)
class Running:
    """A server with one model."""

    process: subprocess.Popen[bytes]
    port: int
    model: str

    def post(self, body: bytes) -> bytes:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
        try:
            return self._post(connection, body)
        finally:
            connection.close()

    def _post(self, connection: http.client.HTTPConnection, body: bytes) -> bytes:
        connection.request("POST", f"/predictions/{self.model}", body)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {answer[:300]!r}")
        return answer

    def rate(self, body: bytes, *, clients: int, seconds: float) -> float:
        """Answers per second, between the first and the last, with so many clients at a time."""
        ends: list[float] = []
        stop = time.monotonic() + seconds

        def client() -> None:
            connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
            while time.monotonic() < stop:
                self._post(connection, body)
                ends.append(time.monotonic())
            connection.close()

        threads = [threading.Thread(target=client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counted = sorted(end for end in ends if end <= stop)
        return (len(counted) - 1) / (counted[-1] - counted[0])

    def burst(self, body: bytes, count: int) -> None:
        """So many requests at once."""
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(self.post, [body] * count))

    def workers(self) -> list[int]:
        """The process ids of its workers."""
        pids = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == self.process.pid:
                pids.append(int(stat.parent.name))
        return pids


@contextmanager
def serving(archive: Path, *, workers: int = 1, env: dict[str, str] | None = None) -> Iterator[Running]:
    """A server for one archive, ready to answer."""
    port = free_port()
    command = [sys.executable, "-m", "flambeau.cli.main", "serve", str(archive), "--workers", str(workers)]
    command += ["--port", str(port), "--management-port", str(port + 1), "--metrics-port", "0"]
    log = archive.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **(env or {})})
    try:
        deadline = time.monotonic() + 300
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
        yield Running(process, port, archive.stem)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def is_ready(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection(HOST, port, timeout=5)
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False


def free_port() -> int:
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind((HOST, port))
                second.bind((HOST, port + 1))
            except OSError:
                continue
            return port


@contextmanager
def bare_loop(archive: Path, body: bytes, batch_size: int, folder: Path, threads: int) -> Iterator["BareLoop"]:
    """The same handler in a process of its own, called in a plain loop."""
    sample = folder / "body.bin"
    sample.write_bytes(body)
    command = [sys.executable, str(Path(__file__).parent / "bare_loop.py"), str(archive), str(sample), str(batch_size)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout
        process.stdout.readline()
        yield BareLoop(process)
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class BareLoop:
    """A handler that waits to be called for a while."""

    process: "subprocess.Popen[str]"

    def rate(self, seconds: float) -> float:
        """Rows per second."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))


def pss_mb(pids: list[int]) -> tuple[float, float]:
    """Their memory together, in MB: each page counted once (PSS), and once for each of them (RSS)."""
    totals = {"Pss": 0, "Rss": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in totals:
                totals[name] += int(rest.split()[0])
    return totals["Pss"] / 1024, totals["Rss"] / 1024


def median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the ratios of neighboring turns; both saw the same load of the machine."""
    return median([one / other for one, other in zip(ours, theirs, strict=True)])
