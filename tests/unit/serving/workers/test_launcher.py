"""Processes are started beside the event loop, a few at a time, and nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
import uvloop

from flambeau.serving.workers import launcher as module
from flambeau.serving.workers.launcher import REAPER, Launcher, StartPlaces
from support.fake_workers import until

LOOPS = pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
READS = "import socket, sys; print(socket.socket(fileno=int(sys.argv[1])).recv(9)); print('last', file=sys.stderr)"


@pytest.fixture
def launcher():
    launcher = Launcher(num_cores=1)
    yield launcher
    launcher.close()


async def start(launcher, *command, inherited=None, folder="/"):
    place = await launcher.take_place()
    return await launcher.start(place, command, folder=folder, environment=dict(os.environ), inherited=inherited)


@pytest.mark.parametrize("has_pidfd", [True, False])
@LOOPS
def test_process_inherits_its_socket_and_its_output_and_exit_are_read(launcher, new_loop, has_pidfd, monkeypatch):
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open")

    async def run():
        ours, theirs = socket.socketpair()
        number = str(theirs.fileno())
        process = await start(launcher, sys.executable, "-c", READS, number, inherited=theirs)
        assert theirs.fileno() == -1
        ours.sendall(b"hello")
        ours.close()
        async with asyncio.timeout(30):
            assert await process.wait() == 0
            assert [await process.stdout.read(99), await process.stdout.read(99)] == [b"b'hello'\n", b""]
            assert [await process.stderr.read(99), await process.stderr.read(99)] == [b"last\n", b""]
        process.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


async def test_status_of_a_killed_process_is_its_signal(launcher):
    process = await start(launcher, "sleep", "100")
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        assert await process.wait() == process.returncode == -9
    process.close()


async def test_process_that_cannot_be_started_is_an_error_and_its_socket_is_closed(launcher):
    ours, theirs = socket.socketpair()
    with pytest.raises(FileNotFoundError):
        await start(launcher, "/no/such/program", inherited=theirs)
    assert theirs.fileno() == -1
    ours.close()


async def test_process_that_is_not_awaited_any_more_is_killed(launcher, monkeypatch):
    may_start = threading.Event()
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            may_start.wait(30)
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(module.subprocess, "Popen", Popen)
    ours, theirs = socket.socketpair()
    starting = asyncio.ensure_future(start(launcher, "sleep", "100", inherited=theirs))
    await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.wait([starting])
    assert theirs.fileno() != -1  # the thread still needs it: nobody else may get its number
    may_start.set()
    await until(lambda: started and started[0].poll() == -9)
    await until(lambda: theirs.fileno() == -1)
    ours.close()


async def test_only_so_many_processes_start_at_a_time(monkeypatch):
    places = StartPlaces(2)
    first, _ = [await places.take() for _ in range(2)]
    third = asyncio.ensure_future(places.take())
    await asyncio.sleep(0.01)
    assert not third.done()
    first.leave()
    first.leave()  # its timer, or its exit after it was ready
    fourth = asyncio.ensure_future(places.take())
    await third
    assert not fourth.done()
    fourth.cancel()


async def test_process_that_takes_long_does_not_delay_the_next(monkeypatch):
    monkeypatch.setattr(module, "PLACE_S", 0.01)
    places = StartPlaces(1)
    await places.take()
    async with asyncio.timeout(30):
        await places.take()


def test_reaper_kills_the_groups_that_are_left():
    group = subprocess.Popen(["sleep", "100"], start_new_session=True)
    spared = subprocess.Popen(["sleep", "100"], start_new_session=True)
    reaper = subprocess.Popen(REAPER, stdin=subprocess.PIPE)
    half = f"+{spared.pid}"  # of a longer number: the server was killed while it wrote
    reaper.communicate(f"+{spared.pid}\n+{group.pid}\n-{spared.pid}\n{half}".encode())
    assert group.wait(30) == -9
    assert spared.poll() is None
    spared.kill()
    spared.wait()


async def test_reaper_that_does_not_read_is_replaced(launcher):
    process = await start(launcher, "sleep", "100")
    reaper = launcher._reaper
    reaper.send_signal(signal.SIGSTOP)
    os.write(reaper.stdin.fileno(), b"+99999999\n" * 6_500)  # the pipe is nearly full
    for _ in range(1000):
        launcher._submit(launcher._forget, 99999999)
    await until(lambda: launcher._reaper not in (None, reaper))
    assert reaper.wait(30) == -9
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    process.close()


async def test_reaper_that_dies_is_replaced_before_anything_changes(launcher, monkeypatch):
    """A line that is written while the reaper dies arrives nowhere, and the next one may be hours away."""
    monkeypatch.setattr(module, "REAPER_REST_S", 0.01)
    process = await start(launcher, "sleep", "100")
    reaper = launcher._reaper
    os.kill(reaper.pid, signal.SIGKILL)
    await until(lambda: launcher._reaper not in (None, reaper))
    launcher._reaper.stdin.close()  # as if the server were gone
    async with asyncio.timeout(30):
        assert await process.wait() == -9
    process.close()


async def test_reaper_that_cannot_live_is_not_started_in_a_loop(launcher, monkeypatch):
    monkeypatch.setattr(module, "REAPER_REST_S", 60.0)
    monkeypatch.setattr(module, "REAPER", ("false",))
    started = []
    new = module.subprocess.Popen
    monkeypatch.setattr(module.subprocess, "Popen", lambda *a, **o: started.append(a) or new(*a, **o))
    process = await start(launcher, "sleep", "100")
    await until(lambda: launcher._reaper.poll() == 1)
    await asyncio.sleep(0.05)
    assert len(started) == 2  # the process and one reaper
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    process.close()
