from __future__ import annotations

import asyncio
import socket

from flambeau.wire.channel import BURST_READS, ServerChannel, WorkerChannel
from flambeau.wire.messages import Cancel, Part, Stop


def test_messages_cross_in_both_directions_and_the_end_is_noticed():
    async def cross():
        heard, closed = [], asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        channel = ServerChannel(heard.extend, closed.set_result, 1 << 20)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: channel, ours)
        worker = WorkerChannel(theirs, 1 << 20)
        worker.send([Part(1, b"a"), Part(2, b"b")])
        channel.send(Stop())
        assert await asyncio.to_thread(worker.receive) == Stop()
        theirs.close()
        assert await closed == ""
        return heard

    assert asyncio.run(cross()) == [Part(1, b"a"), Part(2, b"b")]


def test_malformed_frame_closes_the_channel_with_a_reason():
    async def cross():
        heard, closed = [], asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        channel = ServerChannel(heard.extend, closed.set_result, 1 << 20)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: channel, ours)
        WorkerChannel(theirs, 1 << 20).send([Part(1, b"good")])
        theirs.sendall(b"\x01\x00\x00\x00\xc1")
        reason = await closed
        theirs.close()
        return heard, reason

    heard, reason = asyncio.run(cross())
    assert heard == [Part(1, b"good")]
    assert "malformed frame" in reason


def test_burst_of_parts_loses_none_and_comes_in_fewer_reads():
    async def cross():
        reads, closed = [], asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair()
        channel = ServerChannel(reads.append, closed.set_result, 1 << 20)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: channel, ours)
        worker = WorkerChannel(theirs, 1 << 20)

        def burst():
            for i in range(2000):
                worker.send([Part(1, b"%d" % i, last=i == 1999)])

        await asyncio.to_thread(burst)
        async with asyncio.timeout(30):
            while not reads or not reads[-1][-1].last:
                await asyncio.sleep(0.001)
        theirs.close()
        await closed
        return reads

    reads = asyncio.run(cross())
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
