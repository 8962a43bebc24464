"""The ten messages between server and worker.

To the worker: Load, Run, Cancel, Flow, Stop. To the server: Ready, Part, Failed, Samples, EngineReport.
They carry no tensors, pickles or exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

Kind = Literal["predict", "explain", "describe", "generate", "tokenize", "adapter"]
# How a worker gets its jobs: in batches; one by one into a continuous batch; in batches of sequences, whose jobs
# depend on those before; or one by one, many at a time.
Schedule = Literal["batches", "continuous", "sequences", "async"]

CANCELLED = 499  # the status of a job whose client is gone, as in nginx


class Shared(Struct, array_like=True, frozen=True, gc=False):
    """A body in shared memory: the segment's number, the path to open it, and the length."""

    serial: int
    path: str
    size_bytes: int


class Request(Struct, array_like=True, frozen=True):
    """One job: headers as the client sent them, the body as bytes."""

    job_id: int
    request_id: str
    headers: list[tuple[str, str]]
    body: bytes | Shared
    kind: Kind = "predict"
    url_path: str = ""
    query: str = ""  # parameters of the URL that are inputs as well
    envelope: str = ""  # around the handler for this call; not used with a model that has an envelope
    fields: list[tuple[str, int]] | None = None  # (name, size in bytes) of the fields that the body is made of
    state: list[bytes] = []  # sent by a worker that died, to resume the reply
    tenant: str = ""  # the name of the client's key; empty: the server has no keys


class Load(Struct, array_like=True, tag=1, frozen=True):
    """Load this model; always the first message."""

    model: str
    version: str
    folder: str
    handler: str
    batch_size: int
    gpu_id: int | None
    decode_input: bool
    limit_max_image_pixels: bool
    max_response_bytes: int
    probe: Shared | None = None  # a segment to open, as a test whether memory can be shared
    envelope: str = ""  # around the handler's input and output; the name of its module
    watch: bool = False  # reload the handler's code when it changes
    schedule: Schedule = "batches"
    rank: int = 0  # of this process in a rank group; rank 0 sends the replies
    keeps_step: bool = False  # all ranks must make the same calls
    explains_bodies: bool = False  # a handler's failure with JSON of another content type is the client's
    metrics_file: str = ""  # the metrics configuration, and …
    metrics: list[tuple[str, str, str, list[str]]] = []  # … its metrics for handlers: (name, kind, unit, dimensions)
    json_logs: bool = False  # print records of Python's logging as WorkerRecords
    traces: bool = False  # requests with a sampled `traceparent` are traced; the handler may add spans of its own


class Run(Struct, array_like=True, tag=2, frozen=True):
    """Run these jobs as one batch."""

    jobs: list[Request]


class Cancel(Struct, array_like=True, tag=3, frozen=True):
    """The clients of these jobs are gone."""

    job_ids: list[int]


class Flow(Struct, array_like=True, tag=9, frozen=True):
    """The client of a streamed reply does not read, or reads again: its generator waits, or goes on."""

    job_id: int
    is_paused: bool


class Stop(Struct, array_like=True, tag=4, frozen=True):
    """Finish the jobs sent before this, then exit."""


class TensorSpec(Struct, array_like=True, frozen=True):
    """An input or output of a model in KServe's words; -1 in the shape is any size."""

    name: str
    datatype: str
    shape: list[int]


class Ready(Struct, array_like=True, tag=5, frozen=True):
    """The model is loaded."""

    is_concurrent: bool = False  # an `async def` handler takes many batches at a time
    can_share_memory: bool = False
    depth: int = 1  # batches in flight; more than one: the next is prepared while the current one is computed
    is_continuous: bool = False  # its jobs are one batch, and each call of the handler is a step
    places: int = 0  # jobs at a time; 0: as configured
    abilities: list[
        str
    ] = []  # what front ends may ask for besides predictions: "generate", "chat", "tokenize", "embed"
    max_length: int = 0  # tokens of a prompt and its completion; 0: not known
    example: str = ""  # a request body that the handler accepts, see example_requests; empty if not known
    inputs: list[TensorSpec] = []  # as the handler declares them; empty: not known
    outputs: list[TensorSpec] = []
    adapters: list[str] = []  # names of adapters that requests may ask for, besides the model itself


class GenerationWork(Struct, array_like=True, frozen=True, gc=False):
    """What an engine did for one job; tokens of all its choices together."""

    first_token_s: float  # from the moment the job joined the engine
    num_prompt: int
    num_cached: int  # of the prompt, found in the prefix cache
    num_tokens: int
    num_drafted: int = 0
    num_accepted: int = 0
    num_preempted: int = 0
    finish_reasons: list[str] = []  # one for each choice


class Work(Struct, array_like=True, frozen=True, gc=False):
    """How a worker spent its time on a batch, or on one generation.

    Points in time are of the monotonic clock, which the processes of a host share. Without device synchronization:
    the time of a kernel counts for the stage that waits for its result.
    """

    began: float  # before the inputs were read
    ended: float  # when the replies were ready to be sent
    read_s: float  # reading the inputs
    handler_s: float
    stages: tuple[float, float, float] | None = None  # preprocess, inference, postprocess; None: unknown
    generation: GenerationWork | None = None
    pauses: list[tuple[str, float, float]] | None = None  # what else the process did: (what, when it began, seconds)


class Part(Struct, array_like=True, tag=6, frozen=True):
    """A piece of a job's reply; status and headers count in the first one only."""

    job_id: int
    body: bytes
    last: bool = True
    status: int = 200
    phrase: str = ""
    headers: list[tuple[str, str]] | None = None
    work: Work | None = None  # in the last part of the first job of a batch; None: unknown, or told before
    state: bytes = b""  # with the states before, enough for another worker to resume after this part


class Failed(Struct, array_like=True, tag=7, frozen=True):
    """These jobs failed; without jobs: the model could not be loaded."""

    job_ids: list[int]
    status: int
    message: str
    detail: str = ""  # the traceback, for logs and trusted callers
    is_final: bool = False  # another attempt to load the model would fail as well
    is_bad_request: bool = False  # the requests are at fault; their handler did not choose this answer
    reason: str = ""  # the cause in one line, where the message does not have it
    needs_install: bool = False  # the model cannot be loaded until a package is installed
    field: str = ""  # of a bad request: the field that is invalid


def cancelled(job_id: int) -> Failed:
    """The answer to a job that was cancelled before it began."""
    return Failed([job_id], CANCELLED, "cancelled before it began")


class Samples(Struct, array_like=True, tag=8, frozen=True):
    """Metric samples of a handler: (name, kind, unit, value, dimensions, request ids)."""

    samples: list[tuple[str, str, str, float, list[tuple[str, str]], str]]


class EngineReport(Struct, array_like=True, tag=10, frozen=True):
    """The load of a worker's engine now, and what it has counted since the last report."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_preempted: int  # since the last report
    num_steps: int  # since the last report
    token_gaps: list[int]  # tokens since the last report by the time since the one before, in TOKEN_GAPS' buckets
    token_gaps_s: float  # the sum of those times
    num_blocks_saved: int = 0  # KV blocks that were copied to host memory or disk, since the last report
    num_blocks_restored: int = 0  # KV blocks that were copied back


# Bounds of the buckets for the time between two tokens of a sequence, in seconds.
TOKEN_GAPS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)

ToWorker = Load | Run | Cancel | Flow | Stop
ToServer = Ready | Part | Failed | Samples | EngineReport


def header(headers: Iterable[tuple[str, str]], name: str) -> str | None:
    """The value of the first header of this name, in any case; `name` is in lower case."""
    size = len(name)
    for key, value in headers:
        if len(key) == size and key.lower() == name:
            return value
    return None
