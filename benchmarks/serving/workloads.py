"""What is measured: every workload as data, each model a server is started with and each load put on it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["load", "beside loop", "stream", "start", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A request body made by `assets`, by file name."""

    file: str
    content_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What goes into the archive: the handler, its task and the settings in model-config.yaml."""

    task: str
    handler: str = "bench_handler"
    workers: int = 1
    batch_size: int = 1

    @property
    def max_batch_delay_ms(self) -> int:
        """5 ms to fill a batch; TorchServe wants at least 1, and a batch of one never waits."""
        return 5 if self.batch_size > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One point: a body sent over and over by so many connections."""

    point: str
    body: Body
    connections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One server start: a model and the loads it gets, one after the other."""

    name: str
    model: Model
    loads: tuple[Load, ...]
    kind: Kind = "load"
    # How many times longer than usual a point lasts: at 20 answers a second, one cut off at the end is worth a percent.
    stretch: int = 1


ECHO = Body(file="echo.json", content_type="application/json")
VECTOR = Body(file="vector.json", content_type="application/json")
BLOB_1MB = Body(file="blob-1mb.bin", content_type="application/octet-stream")
BLOB_10MB = Body(file="blob-10mb.bin", content_type="application/octet-stream")
PICTURE = Body(file="picture.jpg", content_type="image/jpeg")
STREAM = Body(file="stream.json", content_type="application/json")
SLOW_STREAM = Body(file="slow-stream.json", content_type="application/json")

CHUNKS = 200
SLOW_CHUNKS = 20
SLOW_PAUSE_MS = 20

MEMORY_REQUESTS = 100_000


def _loads(name: str, body: Body, *connections: int) -> tuple[Load, ...]:
    return tuple(Load(point=f"{name} c={count}", body=body, connections=count) for count in connections)


WORKLOADS: dict[str, tuple[Case, ...]] = {
    # W1: the cost of a request.
    "W1": (Case(name="W1", model=Model(task="echo"), loads=_loads("W1", ECHO, 1, 64)),),
    # W2: the cost of a request when batching shares the trip to the worker.
    "W2": (Case(name="W2", model=Model(task="echo", batch_size=32), loads=_loads("W2", ECHO, 256)),),
    # W3: a small network fed with JSON, where parsing counts as much as computing.
    "W3": (
        Case(name="W3 b1", model=Model(task="mlp"), loads=_loads("W3 b1", VECTOR, 64)),
        Case(name="W3 b16", model=Model(task="mlp", batch_size=16), loads=_loads("W3 b16", VECTOR, 64)),
    ),
    # W4: large bodies, where copies count.
    "W4": (
        Case(
            name="W4",
            model=Model(task="blob"),
            loads=(*_loads("W4 1MB", BLOB_1MB, 4), *_loads("W4 10MB", BLOB_10MB, 4)),
        ),
    ),
    # W5: a real network, where a good server costs nothing; the bare loop is what the machine could do without one.
    "W5": (
        Case(
            name="W5 w1",
            model=Model(task="image"),
            loads=_loads("W5 w1", PICTURE, 8),
            kind="beside loop",
            stretch=2,
        ),
        Case(
            name="W5 w2",
            model=Model(task="image", workers=2),
            loads=_loads("W5 w2", PICTURE, 8),
            kind="beside loop",
            stretch=2,
        ),
    ),
    # W6: streaming, as a language model would.
    "W6": (Case(name="W6", model=Model(task="stream"), loads=_loads("W6", STREAM, 1, 16), kind="stream"),),
    "start": (
        Case(
            name="start",
            model=Model(task="echo", handler="echo_handler"),
            loads=_loads("start", ECHO, 1),
            kind="start",
        ),
    ),
    "memory": (
        Case(
            name="memory",
            model=Model(task="echo", handler="echo_handler"),
            loads=_loads("memory", ECHO, 16),
            kind="memory",
        ),
    ),
}


def tasks_of(workloads: Iterable[str]) -> set[str]:
    """The tasks these workloads need, so that only their models are made."""
    return {case.model.task for name in workloads for case in WORKLOADS[name]}
