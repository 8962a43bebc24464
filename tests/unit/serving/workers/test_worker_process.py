"""A worker's process: who may connect as one, and how its socket is handed to the event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from types import SimpleNamespace

import pytest
import uvloop

from flambeau.config.server import SECRET_VARIABLES, SequenceHeaders
from flambeau.metrics.traffic import HostTraffic, ModelTraffic
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import ServerEvents
from flambeau.serving.slow_requests import SlowRequests
from flambeau.serving.workers import worker_process
from flambeau.serving.workers.launcher import StartPlaces
from flambeau.serving.workers.remote_worker import RemoteWorker
from flambeau.serving.workers.worker_process import TokenGate, WorkerProcess, WorkerSpec, environment_for, shown_lines
from flambeau.wire.channel import ServerChannel
from flambeau.wire.messages import Failed, Load
from support.fake_workers import until

TOKEN = b"secret"


class Transport:
    def __init__(self):
        self.is_aborted = False
        self.protocol = None

    def abort(self):
        self.is_aborted = True

    def pause_reading(self):
        self.is_reading = False

    def resume_reading(self):
        self.is_reading = True

    def set_protocol(self, protocol):
        self.protocol = protocol


class Channel:
    transport = None
    was_open_to = None

    def connection_made(self, transport):
        self.transport = transport


def note_open(channel):
    """Take note of whom the channel was open to when the model could be sent."""
    channel.was_open_to = channel.transport if channel.transport.is_reading else None


def meet(*chunks):
    """A gate that got these chunks, its transport, and the connections that wait."""
    strangers, transport = set(), Transport()
    gate = TokenGate(TOKEN, Channel, note_open, strangers)
    gate.connection_made(transport)
    for chunk in chunks:
        gate.data_received(chunk)
    return gate, transport, strangers


async def test_worker_is_let_through_once_it_has_shown_its_token():
    gate, transport, strangers = meet(b"sec", b"ret")
    assert gate._timer.cancelled()
    assert isinstance(transport.protocol, Channel)
    assert transport.protocol.was_open_to is transport  # its model is sent only then
    assert not transport.is_aborted
    assert not strangers


@pytest.mark.parametrize("word", [b"sesame", b"secret and more"])
async def test_stranger_is_turned_away(word):
    _, transport, strangers = meet(word)
    assert transport.is_aborted
    assert not strangers


async def test_worker_that_sends_no_proof_is_rejected_in_time(monkeypatch):
    monkeypatch.setattr(worker_process, "TOKEN_TIMEOUT_S", 0.01)
    _, transport, strangers = meet(b"sec")
    await until(lambda: transport.is_aborted)
    assert not strangers


async def test_connections_in_their_handshake_close_with_the_listener():
    gate, transport, strangers = meet()
    assert strangers == {gate}
    gate.close()
    assert transport.is_aborted
    assert not strangers


# ---- a worker that exits while its socket is handed over: its descriptor is closed once ----

LOAD = Load("m", "1.0", "/", "h.py", 1, None, True, True, 1)
LOOPS = pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
LIMIT_S = 10.0


@pytest.fixture
def numbers(monkeypatch):
    """The descriptors of the server's ends."""
    found = []

    def socketpair():
        ours, theirs = socket.socketpair()
        found.append(ours.fileno())
        return ours, theirs

    monkeypatch.setattr(worker_process, "socket", SimpleNamespace(**{**vars(socket), "socketpair": socketpair}))
    return found


@pytest.fixture
def gate(monkeypatch):
    """Processes that are dead as soon as they have started; their lives end when the gate opens."""
    gate = asyncio.Event()

    async def start(self, place, *arguments, inherited=None, **options):
        if inherited is not None:
            inherited.close()

    async def watch(self):
        await gate.wait()
        return WorkerExit(reason="killed by SIGKILL")

    monkeypatch.setattr(WorkerProcess, "_start", start)
    monkeypatch.setattr(WorkerProcess, "_watch", watch)
    return gate


def new_worker(num_ranks):
    ranks = [WorkerSpec(id=i, load=LOAD, environment={}, max_frame_bytes=1) for i in range(1, num_ranks)]
    output = SimpleNamespace(name="", of_rank=lambda rank: None)
    return RemoteWorker(
        WorkerSpec(id=0, load=LOAD, environment={}, max_frame_bytes=1, others=tuple(ranks)),
        on_free=lambda: None,
        on_lost=lambda *lost: None,
        on_samples=lambda samples: None,
        traffic=ModelTraffic("m", HostTraffic()),
        slow=SlowRequests(),
        output=output,
        events=ServerEvents(),
        launcher=SimpleNamespace(take_place=StartPlaces(num_ranks).take),
    )


async def run_worker_until(num_ranks, condition, gate, then=lambda: None):
    """Run a worker until a condition holds, do something, and let its process end."""
    running = asyncio.ensure_future(new_worker(num_ranks).run())
    await until(condition, LIMIT_S)
    then()
    gate.set()
    return await running


def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@LOOPS
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("is_early", [False, True], ids=["in time", "early"])
def test_descriptor_of_a_worker_that_died_at_once_is_closed_once(
    new_loop, num_ranks, is_early, numbers, gate, monkeypatch
):
    if is_early:  # something is sent as soon as there is a transport, and fails
        made = ServerChannel.connection_made
        monkeypatch.setattr(ServerChannel, "connection_made", lambda self, to: (made(self, to), self.send(LOAD)))

    def are_closed():
        return len(numbers) == num_ranks and not any(map(is_open, numbers))

    def take_numbers():
        for number in numbers:
            os.dup2(nothing, number)  # as the next connection of a client would take it

    nothing = os.open(os.devnull, os.O_RDONLY)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        worker_exit = runner.run(run_worker_until(num_ranks, are_closed, gate, take_numbers))
        gc.collect()
    try:
        assert "killed by SIGKILL" in worker_exit.reason
        assert [is_open(number) for number in numbers] == [True] * num_ranks
    finally:
        for number in filter(is_open, [*numbers, nothing]):
            os.close(number)


@LOOPS
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_model_is_sent_when_the_connection_stands(new_loop, num_ranks, numbers, gate, monkeypatch):
    events = []
    made, send = ServerChannel.connection_made, ServerChannel.send

    def connection_made(self, transport):
        made(self, transport)
        events.append((self, "stands"))

    def note_send(self, message):
        events.append((self, message))
        send(self, message)

    monkeypatch.setattr(ServerChannel, "connection_made", connection_made)
    monkeypatch.setattr(ServerChannel, "send", note_send)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run_worker_until(num_ranks, lambda: len(events) >= 2 * num_ranks, gate))
    channels = dict.fromkeys(channel for channel, _ in events)
    assert len(channels) == num_ranks
    for channel in channels:
        assert [event for one, event in events if one is channel] == ["stands", LOAD]


def test_environment_has_no_secret(monkeypatch):
    for variable in SECRET_VARIABLES:
        monkeypatch.setenv(variable, "secret")
    load = Load("m", "1.0", "/model", "h.py", 1, None, True, True, 1000)
    environment = environment_for(load, threads=1, hidden="", sequence_headers=SequenceHeaders())
    assert "secret" not in environment.values()
    assert "PATH" in environment


def test_environment_has_the_header_names_of_the_server():
    load = Load("m", "1.0", "/model", "h.py", 1, None, True, True, 1000)
    names = SequenceHeaders(id="X-Session", start="X-Start", end="X-End")
    environment = environment_for(load, threads=1, hidden="", sequence_headers=names)
    found = [environment[f"TS_REQUEST_SEQUENCE_{name}"] for name in ("ID", "START", "END")]
    assert found == ["X-Session", "X-Start", "X-End"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}),
        ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1"}),  # MKL reads it too; its own variable would win in PyTorch
        ({"MKL_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "1"}),
    ],
)
def test_threads_that_the_user_has_set_stay(monkeypatch, given, expected):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment = environment_for(LOAD, threads=3, hidden="", sequence_headers=SequenceHeaders())
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    assert {name: environment[name] for name in names if name in environment} == expected


async def test_worker_that_is_killed_while_it_waits_for_its_start_is_not_started():
    places = StartPlaces(1)
    taken = await places.take()
    spec = WorkerSpec(id=0, load=LOAD, environment={}, max_frame_bytes=1)
    launcher = SimpleNamespace(take_place=places.take)  # it cannot start anything
    process = WorkerProcess(spec, lambda: None, SimpleNamespace(name=""), ServerEvents(), launcher)
    running = asyncio.ensure_future(process.run())
    await asyncio.sleep(0.01)
    assert not running.done()
    process.kill(WorkerExit(reason="it was stopped", spares_jobs=True))
    async with asyncio.timeout(LIMIT_S):
        assert await running == WorkerExit(reason="it was stopped", spares_jobs=True, by_server=True)
        taken.leave()
        await places.take()  # and nobody waits in front of it


async def test_worker_that_is_killed_before_it_runs_is_not_started():
    spec = WorkerSpec(id=0, load=LOAD, environment={}, max_frame_bytes=1)
    process = WorkerProcess(spec, lambda: None, SimpleNamespace(name=""), ServerEvents(), SimpleNamespace())
    process.kill(WorkerExit(reason="it was stopped"))
    assert (await process.run()).reason == "it was stopped"


def test_lines_of_a_failed_load_begin_with_the_author_and_do_not_repeat_the_reason():
    trace = [
        "Traceback (most recent call last):",
        '  File "handler.py", line 7, in initialize',
        "    load()",
        "    ^^^^",
    ]
    library = [f'  File "library.py", line {i}' for i in range(30)]
    detail = "\n".join(["no file x", *trace, *library, "ValueError: x"])
    lines = shown_lines(Failed([], 500, "no file x", detail))
    assert lines[:5] == (*trace, "…")
    assert lines[-2:] == ('  File "library.py", line 29', "ValueError: x")
    assert len(lines) == 14
    assert shown_lines(Failed([], 500, "other", "one\ntwo")) == ("one", "two")
