"""The messages that place workers on other machines: server and placer, server and agent. And their channel.

The placer is the only process that knows the cluster's manager. An agent is a process on a machine of the cluster; it
dials the server, and starts workers there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec
from msgspec import Struct

from flambeau.wire.channel import INVALID, PREFIX, FrameBuffer

MAX_CONTROL_BYTES = 64 << 20  # of one message; a piece of a model is the largest


# ---- server → placer ----


class Place(Struct, array_like=True, tag=1, frozen=True):
    """Start agents, each on a machine of its own with these resources. They dial `address` with their tokens."""

    id: str
    agents: list[str]  # their names
    tokens: list[str]  # secret, and good for one connection
    address: str
    fingerprint: str  # of the server's certificate
    heartbeat_s: float = 3
    cpus: float = 1
    gpus: float = 0
    resources: dict[str, float] = {}
    pack: bool = False  # on the machine with the most of our workers; otherwise with the fewest
    node: str = ""  # only there, or on the machine of that name …
    host: str = ""  # … which may have another id after a restart of the cluster
    avoid: list[str] = []  # ids of machines that are probably lost


class Remove(Struct, array_like=True, tag=2, frozen=True):
    """End the agents of a Place, and free its resources."""

    id: str


class AskNodes(Struct, array_like=True, tag=3, frozen=True):
    serial: int


class Welcome(Struct, array_like=True, tag=4, frozen=True):
    """To a machine that has joined by itself: the server knows the secret too. Always the first message."""

    proof: str


# ---- placer → server ----


class Connected(Struct, array_like=True, tag=11, frozen=True):
    """The placer has reached the cluster."""

    words: str


class Waiting(Struct, array_like=True, tag=12, frozen=True):
    """No machine has room yet."""

    id: str
    reason: str


class Lost(Struct, array_like=True, tag=13, frozen=True):
    """The agents of a Place have ended, or could not be started."""

    id: str
    reason: str


class NodeInfo(Struct, array_like=True, frozen=True):
    """One machine of the cluster."""

    id: str
    host: str
    address: str
    is_alive: bool
    resources: dict[str, float]


class Nodes(Struct, array_like=True, tag=14, frozen=True):
    """The answer to AskNodes."""

    serial: int
    nodes: list[NodeInfo]


# ---- server → agent ----


class Start(Struct, array_like=True, tag=21, frozen=True):
    """Start a worker process, which dials the server with its token."""

    worker: str
    folder: str
    environment: dict[str, str]
    token: str
    python: str = ""  # empty: the agent's own
    local: str = ""  # the name of the server's Unix socket, which a worker of the same machine dials instead


class Adopt(Struct, array_like=True, tag=22, frozen=True):
    """Watch a worker that an earlier agent has started. `ticks` is its start time, since ids are used again."""

    worker: str
    pid: int
    ticks: int
    files: list[str]
    positions: list[int]  # in the output files: what the server has


class Kill(Struct, array_like=True, tag=23, frozen=True):
    worker: str


class FindPort(Struct, array_like=True, tag=24, frozen=True):
    """Find a free port for a group of processes."""

    serial: int


class Look(Struct, array_like=True, tag=27, frozen=True):
    """Tell what the kernel knows of a worker's process."""

    serial: int
    worker: str


class TakeStacks(Struct, array_like=True, tag=28, frozen=True):
    """Read the stacks of a worker, a moment later."""

    serial: int
    worker: str
    after_s: float


class FileInfo(Struct, array_like=True, frozen=True):
    """One file of a model."""

    path: str  # relative
    size: int
    mtime_ns: int


class RemoteFiles(Struct, array_like=True, frozen=True):
    """Where a machine may get files of a model by itself: from the hub, or as an archive from a URL."""

    folder: str = ""  # below the model's folder; empty: all of it
    hub: str = ""  # org/name@commit
    url: str = ""
    allowed: list[str] = []  # expressions that the URL, and those it redirects to, must match
    allow_private: bool = False

    @property
    def shown(self) -> str:
        """A name for logs, without a query, which may be secret."""
        return self.hub or self.url.partition("?")[0]


class Prepare(Struct, array_like=True, tag=25, frozen=True):
    """Have the files of a model: at the same path, or else in the machine's cache, under their digest."""

    serial: int
    folder: str
    files: list[FileInfo]
    digest: str = ""  # of the contents; empty: answer whether they are at the same path
    remote: list[RemoteFiles] = []


class FilePiece(Struct, array_like=True, tag=26, frozen=True):
    """A piece of a model's files, in order; an empty path is the end."""

    serial: int
    path: str
    data: bytes


# ---- agent → server ----


class Joined(Struct, array_like=True, tag=31, frozen=True):
    """The agent is here; always its first message."""

    agent: str
    node: str  # the cluster's id of the machine
    host: str  # its name
    address: str  # for the processes of a group
    pid: int
    devices: str  # the GPUs that it may use, as CUDA_VISIBLE_DEVICES has them
    versions: dict[str, str]


class Started(Struct, array_like=True, tag=32, frozen=True):
    worker: str
    pid: int
    ticks: int
    files: list[str]  # of its standard output and errors


class Printed(Struct, array_like=True, tag=33, frozen=True):
    """What a worker has printed; `position` is the end of it in its file."""

    worker: str
    is_error: bool
    data: bytes
    position: int


class Ended(Struct, array_like=True, tag=34, frozen=True):
    """A worker has exited, or could not be started. `code` is None if it is not known: an adopted process."""

    worker: str
    code: int | None
    out_of_memory: bool = False
    reason: str = ""  # why it was not started


class Usage(Struct, array_like=True, tag=35, frozen=True):
    """The memory of each worker with its children, in bytes, and whether it is stopped by a signal."""

    workers: list[tuple[str, int, bool]]


class FoundPort(Struct, array_like=True, tag=36, frozen=True):
    serial: int
    port: int


class Prepared(Struct, array_like=True, tag=37, frozen=True):
    """Where the files of a model are; an empty folder: not here, or they could not be stored, with the reason."""

    serial: int
    folder: str
    reason: str = ""


class WantPieces(Struct, array_like=True, tag=38, frozen=True):
    """The machine's cache does not have these files: send them, except those that it has got by itself."""

    serial: int
    held: list[str] = []  # their paths
    problem: str = ""  # why it could not get others


class Looked(Struct, array_like=True, tag=39, frozen=True):
    """A process at one moment; its threads have a name, a state, a system call and a number of waits."""

    serial: int
    activity: str
    user_s: float = 0.0
    system_s: float = 0.0
    num_events: int = 0
    threads: list[tuple[str, str, str, int]] = []


class TookStacks(Struct, array_like=True, tag=40, frozen=True):
    """The stacks of a worker; `is_endless`: its main thread is in a loop that cannot end."""

    serial: int
    text: str
    is_endless: bool


ToPlacer = Place | Remove | AskNodes | Welcome
FromPlacer = Connected | Waiting | Lost | Nodes
ToAgent = Start | Adopt | Kill | FindPort | Look | TakeStacks | Prepare | FilePiece
FromAgent = Joined | Started | Printed | Ended | Usage | FoundPort | Looked | TookStacks | Prepared | WantPieces

to_placer_decoder: msgspec.msgpack.Decoder[ToPlacer] = msgspec.msgpack.Decoder(ToPlacer)
from_placer_decoder: msgspec.msgpack.Decoder[FromPlacer] = msgspec.msgpack.Decoder(FromPlacer)
to_agent_decoder: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
from_agent_decoder: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


class ControlChannel(asyncio.BufferedProtocol, Generic[T]):
    """Either end. `on_message` gets messages as they arrive; `on_closed` gets the reason, once."""

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[T],
        on_message: Callable[[T], None],
        on_closed: Callable[[str], None],
    ) -> None:
        self._decode = decoder.decode
        self._on_message = on_message
        self._on_closed = on_closed
        self._frames = FrameBuffer(MAX_CONTROL_BYTES)
        self._transport: asyncio.Transport | None = None
        self._fault = ""
        self._can_write = asyncio.Event()
        self._can_write.set()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: Any) -> None:
        """Send a message; does nothing when the channel is closed."""
        if self._transport is not None:
            payload = _encode(message)
            self._transport.write(len(payload).to_bytes(PREFIX, "little") + payload)

    async def drain(self) -> None:
        """Wait until the other end has read enough of what was sent."""
        await self._can_write.wait()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.space()

    def buffer_updated(self, nbytes: int) -> None:
        for payload in self._frames.filled(nbytes):
            try:
                message = self._decode(payload)
            except INVALID as error:
                self._fault = f"a malformed message ({error})"
                assert self._transport is not None
                self._transport.abort()
                return
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._can_write.set()
        self._on_closed(self._fault or (str(exc) if exc else ""))
