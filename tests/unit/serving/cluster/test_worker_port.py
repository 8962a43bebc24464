"""The port where agents and workers of other machines connect."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from contextlib import asynccontextmanager

import pytest

from flambeau.serving.cluster.worker_port import WorkerPort
from flambeau.wire.channel import ServerChannel
from flambeau.wire.messages import Cancel, Part, Run, Stop
from flambeau.wire.tls import WrongServer, connect_locally, connect_worker

BODY = b"x" * 3_000_000


@asynccontextmanager
async def opened():
    port = WorkerPort("127.0.0.1:0", 3)
    await port.open()
    try:
        yield port
    finally:
        await port.close()


class Meeting:
    """A worker that connects in a thread, and the server's end of its channel."""

    def __init__(self, port):
        self.received = []
        self.is_closed = asyncio.Event()
        self.channel = ServerChannel(self.received.extend, lambda fault: self.is_closed.set(), 1 << 24)
        self.token = port.expect(lambda: self.channel)
        self.port = port

    async def worker(self, token=None, pin=None):
        return await asyncio.to_thread(
            connect_worker, self.port.address, pin or self.port.fingerprint, token or self.token, 3
        )


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_messages_pass_in_both_directions():
    async with opened() as port:
        meeting = Meeting(port)
        worker = await meeting.worker()
        await until(lambda: meeting.channel._transport is not None)
        meeting.channel.send(Cancel([7]))
        assert await asyncio.to_thread(worker.receive) == Cancel([7])
        assert [*worker.poll()] == []
        await asyncio.to_thread(worker.send, [Part(1, BODY)])
        await until(lambda: meeting.received)
        assert meeting.received == [Part(1, BODY)]
        worker.socket.close()
        await asyncio.wait_for(meeting.is_closed.wait(), 20)


async def test_many_messages_are_read_whatever_the_size_of_their_records():
    async with opened() as port:
        meeting = Meeting(port)
        worker = await meeting.worker()
        await until(lambda: meeting.channel._transport is not None)
        for number in range(2000):
            meeting.channel.send(Cancel([number]))
        meeting.channel.send(Run([]))
        meeting.channel.send(Stop())
        messages = []
        while not messages or messages[-1] != Stop():
            messages.append(await asyncio.to_thread(worker.receive))
        assert messages[:2000] == [Cancel([number]) for number in range(2000)]
        worker.socket.close()


async def test_threads_may_send_while_another_receives():
    async with opened() as port:
        meeting = Meeting(port)
        worker = await meeting.worker()
        await until(lambda: meeting.channel._transport is not None)
        threads = [
            threading.Thread(target=lambda i=i: [worker.send([Part(i, b"y" * 5000)]) for _ in range(50)])
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for number in range(50):
            meeting.channel.send(Cancel([number]))
            assert await asyncio.to_thread(worker.receive) == Cancel([number])
        await until(lambda: len(meeting.received) == 200)
        for thread in threads:
            thread.join()
        worker.socket.close()


async def test_token_is_good_for_one_connection(caplog):
    async with opened() as port:
        meeting = Meeting(port)
        first = await meeting.worker()
        await until(lambda: meeting.channel._transport is not None)
        second = await meeting.worker()
        assert await asyncio.to_thread(second.receive) is None
        assert "used before" in caplog.text
        first.socket.close()
        second.socket.close()


async def test_forgotten_token_is_refused():
    async with opened() as port:
        meeting = Meeting(port)
        port.forget(meeting.token)
        worker = await meeting.worker()
        assert await asyncio.to_thread(worker.receive) is None
        worker.socket.close()


async def test_who_is_refused_can_send_more_without_harm():
    """What follows an unknown token was read without an end."""
    async with opened() as port:
        host, number = port.address.rsplit(":", 1)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        _, stranger = await asyncio.open_connection(host, int(number), ssl=context)
        stranger.write(b"not a token" * 1000)
        meeting = Meeting(port)
        worker = await meeting.worker()
        await until(lambda: meeting.channel._transport is not None)
        await until(stranger.is_closing)
        worker.socket.close()


async def test_worker_does_not_show_its_token_to_another_server():
    async with opened() as port:
        meeting = Meeting(port)
        with pytest.raises(WrongServer):
            await meeting.worker(pin="0" * 64)
        assert port._expected  # nobody has used it


async def connect_here(meeting, name=None, token=None):
    return await asyncio.to_thread(connect_locally, name or meeting.port.local_name, token or meeting.token)


async def test_worker_of_the_same_machine_connects_without_tls():
    async with opened() as port:
        meeting = Meeting(port)
        worker = await connect_here(meeting)
        await until(lambda: meeting.channel._transport is not None)
        assert worker.socket.family == socket.AF_UNIX
        meeting.channel.send(Cancel([7]))
        assert await asyncio.to_thread(worker.receive) == Cancel([7])
        await asyncio.to_thread(worker.send, [Part(1, BODY)])
        await until(lambda: meeting.received)
        assert meeting.received == [Part(1, BODY)]
        worker.socket.close()
        await asyncio.wait_for(meeting.is_closed.wait(), 20)


async def test_token_is_good_for_one_connection_of_either_kind(caplog):
    async with opened() as port:
        meeting = Meeting(port)
        first = await meeting.worker()
        await until(lambda: meeting.channel._transport is not None)
        second = await connect_here(meeting)
        assert await asyncio.to_thread(second.receive) is None
        assert "this machine" in caplog.text
        assert "used before" in caplog.text
        first.socket.close()
        second.socket.close()


async def test_server_of_another_machine_or_user_is_not_dialed_locally(monkeypatch):
    async with opened() as port:
        meeting = Meeting(port)
        assert await connect_here(meeting, name="flambeau-elsewhere") is None
        monkeypatch.setattr("flambeau.wire.tls.os.geteuid", lambda: os.getuid() + 1)
        assert await connect_here(meeting) is None
        worker = await meeting.worker()  # the token was not shown
        await until(lambda: meeting.channel._transport is not None)
        worker.socket.close()
