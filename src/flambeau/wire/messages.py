"""The eight messages that cross between server and worker, and what they carry.

To the worker: Load, Run, Cancel, Stop. To the server: Ready, Part, Failed, Samples.
Nothing here is a tensor, a pickle or an exception.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Kind = Literal["predict", "explain", "describe", "generate"]
# How a worker is given its jobs: in batches; one by one into a batch that goes on, call after call; in batches
# whose jobs depend on what came before; or each by itself, beside others.
Schedule = Literal["batches", "continuous", "sequences", "async"]

CANCELLED = 499  # the status of a job whose client has gone, as nginx has it


class Shared(Struct, array_like=True, frozen=True, gc=False):
    """A body that lies in shared memory: which segment, where it can be opened, and how long it is."""

    serial: int
    path: str
    size_bytes: int


class Request(Struct, array_like=True, frozen=True):
    """One job as a worker sees it: headers as the client sent them, the body as bytes."""

    job_id: int
    request_id: str
    headers: list[tuple[str, str]]
    body: bytes | Shared
    kind: Kind = "predict"
    url_path: str = ""
    query: str = ""  # parameters of the URL that are inputs too
    envelope: str = ""  # around the handler for this call only; a model with an envelope of its own needs none
    fields: list[tuple[str, int]] | None = None  # names and sizes of what the body holds, one after another
    state: list[bytes] = []  # what a worker that died had said of its state: the reply goes on from there


class Load(Struct, array_like=True, tag=1, frozen=True):
    """Load this model; the first message a worker gets."""

    model: str
    version: str
    folder: str
    handler: str
    batch_size: int
    gpu_id: int | None
    decode_input: bool
    limit_max_image_pixels: bool
    max_response_bytes: int
    probe: Shared | None = None  # a segment to try, to find out whether memory can be shared
    envelope: str = ""  # wraps the handler's input and output, by the name of its module
    watch: bool = False  # look for changes of the handler's code
    schedule: Schedule = "batches"
    rank: int = 0  # in a group of processes that are one worker; rank 0 answers
    keeps_step: bool = False  # the ranks must all make the same calls
    metrics_file: str = ""  # the metrics configuration, and …
    metrics: list[tuple[str, str, str, list[str]]] = []  # … what it names for handlers: name, kind, unit, dimensions


class Run(Struct, array_like=True, tag=2, frozen=True):
    """Run these jobs as one batch."""

    jobs: list[Request]


class Cancel(Struct, array_like=True, tag=3, frozen=True):
    """Nobody waits for these jobs any more."""

    job_ids: list[int]


class Stop(Struct, array_like=True, tag=4, frozen=True):
    """Finish what was sent before this, then exit."""


class Ready(Struct, array_like=True, tag=5, frozen=True):
    """The model is loaded."""

    is_concurrent: bool = False  # an `async def` handler takes many batches at a time
    can_share_memory: bool = False
    depth: int = 1  # batches it works on at a time: more than one prepares the next while it computes the current
    is_continuous: bool = False  # what it holds is one batch, of which every call of the handler is a step
    places: int = 0  # jobs it takes at a time; 0: as many as the model's configuration says
    abilities: list[str] = []  # "generate", "chat", "embed": what front ends may ask for beside predictions
    max_length: int = 0  # tokens of a prompt and what is generated; 0: not known


class Part(Struct, array_like=True, tag=6, frozen=True):
    """A piece of one job's reply; status and headers count only in the first."""

    job_id: int
    body: bytes
    last: bool = True
    status: int = 200
    phrase: str = ""
    headers: list[tuple[str, str]] | None = None
    handler_s: float = 0.0  # how long the handler took; in the last part of one job of a batch
    state: bytes = b""  # enough, with what came before, for another worker to go on after this part


class Failed(Struct, array_like=True, tag=7, frozen=True):
    """These jobs failed, or, with no jobs, the model could not be loaded."""

    job_ids: list[int]
    status: int
    message: str
    detail: str = ""  # what happened, with the traceback; for logs and for trusted callers
    is_final: bool = False  # another try to load the model would end the same


def cancelled(job_id: int) -> Failed:
    """What becomes of a job that nobody waited for when its turn came."""
    return Failed([job_id], CANCELLED, "cancelled before it began")


class Samples(Struct, array_like=True, tag=8, frozen=True):
    """Metric samples a handler took: (name, kind, unit, value, dimensions, request ids)."""

    samples: list[tuple[str, str, str, float, list[tuple[str, str]], str]]


ToWorker = Load | Run | Cancel | Stop
ToServer = Ready | Part | Failed | Samples
