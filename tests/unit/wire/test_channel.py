from __future__ import annotations

import asyncio
import socket

import pytest

from flambeau.wire.channel import BURST_READS, ServerChannel, WorkerChannel
from flambeau.wire.messages import Cancel, Part, Stop


@pytest.fixture
def ends():
    """A pair of connected sockets: the server's and the worker's."""
    ours, theirs = socket.socketpair()
    yield ours, theirs
    theirs.close()
    ours.close()


async def connect(ours, on_messages):
    """A channel of the server, and the reason why it was closed."""
    loop = asyncio.get_running_loop()
    closed = loop.create_future()
    channel = ServerChannel(on_messages, closed.set_result, 1 << 20)
    await loop.connect_accepted_socket(lambda: channel, ours)
    return channel, closed


async def test_messages_cross_in_both_directions_and_the_end_is_noticed(ends):
    ours, theirs = ends
    received = []
    channel, closed = await connect(ours, received.extend)
    worker = WorkerChannel(theirs, 1 << 20)
    worker.send([Part(1, b"a"), Part(2, b"b")])
    channel.send(Stop())
    assert await asyncio.to_thread(worker.receive) == Stop()
    theirs.close()
    assert await closed == ""
    assert received == [Part(1, b"a"), Part(2, b"b")]


async def test_malformed_frame_closes_the_channel_with_a_reason(ends):
    ours, theirs = ends
    received = []
    _, closed = await connect(ours, received.extend)
    WorkerChannel(theirs, 1 << 20).send([Part(1, b"good")])
    theirs.sendall(b"\x01\x00\x00\x00\xc1")
    assert "malformed frame" in await closed
    assert received == [Part(1, b"good")]


def send_one_by_one(worker, count):
    for i in range(count):
        worker.send([Part(1, b"%d" % i, last=i == count - 1)])


async def test_burst_of_parts_loses_none_and_comes_in_fewer_reads(ends):
    ours, theirs = ends
    reads = []
    _, closed = await connect(ours, reads.append)
    await asyncio.to_thread(send_one_by_one, WorkerChannel(theirs, 1 << 20), 2000)
    theirs.close()
    assert await closed == ""
    assert [part.body for read in reads for part in read] == [b"%d" % i for i in range(2000)]
    assert len(reads) < 1000 + BURST_READS


def test_poll_returns_waiting_messages_without_taking_them():
    ours, theirs = socket.socketpair()
    worker = WorkerChannel(theirs, 1 << 20)
    assert not worker.poll()
    from flambeau.wire.frames import to_frame

    ours.sendall(to_frame([Cancel([1])]))
    assert [*worker.poll()] == [Cancel([1])]
    assert worker.receive() == Cancel([1])
    ours.close()
    assert worker.receive() is None
    theirs.close()
