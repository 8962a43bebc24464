from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flambeau.wire.channel import (
    BURST_READS,
    PREFIX,
    ROOM,
    BadFrame,
    FrameBuffer,
    ServerChannel,
    WorkerChannel,
    decode_to_server,
    decode_to_worker,
    to_frame,
)
from flambeau.wire.messages import Cancel, Failed, Load, Part, Ready, Request, Run, Samples, Shared, Stop


@pytest.fixture
def ends():
    """A pair of connected sockets: the server's and the worker's."""
    ours, theirs = socket.socketpair()
    yield ours, theirs
    theirs.close()
    ours.close()


@pytest.mark.parametrize("use", [lambda c: c.send([Ready()]), lambda c: c.receive(), lambda c: c.poll()])
def test_copy_of_a_process_cannot_use_the_channel(ends, use):
    ours, theirs = ends
    copy = WorkerChannel(theirs.dup(), 1 << 20)
    copy.leave(end_copy)
    with pytest.raises(CopyUsed):
        use(copy)
    theirs.send(b"x")  # the channel itself is open
    assert ours.recv(1) == b"x"


class CopyUsed(Exception):
    pass


def end_copy():
    raise CopyUsed


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


async def test_messages_that_may_wait_travel_in_one_frame_and_in_order(ends):
    ours, theirs = ends
    channel, closed = await connect(ours, lambda messages: None)
    worker = WorkerChannel(theirs, 1 << 20)
    channel.send_soon(Cancel([1]))
    channel.send_soon(Cancel([2]))
    channel.send(Cancel([3]))  # takes the waiting ones along
    channel.send_soon(Cancel([4]))
    received = [await asyncio.to_thread(worker.receive) for _ in range(4)]
    assert received == [Cancel([1]), Cancel([2]), Cancel([3]), Cancel([4])]
    channel.send_soon(Cancel([5]))
    channel.send_soon(Cancel([6]))
    await asyncio.sleep(0)
    frame = await asyncio.to_thread(theirs.recv, 1000)
    assert frame == to_frame([Cancel([5]), Cancel([6])])
    theirs.close()
    await closed


async def test_a_waiting_message_is_dropped_with_its_channel(ends):
    ours, theirs = ends
    channel, closed = await connect(ours, lambda messages: None)
    theirs.close()
    await closed
    channel.send_soon(Stop())
    await asyncio.sleep(0)  # an exception would end the test


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
    from flambeau.wire.channel import to_frame

    ours.sendall(to_frame([Cancel([1])]))
    assert [*worker.poll()] == [Cancel([1])]
    assert worker.receive() == Cancel([1])
    ours.close()
    assert worker.receive() is None
    theirs.close()


TO_WORKER = [
    Load("m", "1.0", "/tmp", "handler.py", 4, None, True, True, 100, Shared(1, "/proc/1/fd/3", 1)),
    Run([Request(1, "id", [("Name", "value")], b"body"), Request(2, "id", [], Shared(7, "/x", 9), "explain", "a/b")]),
    Cancel([1, 2]),
    Stop(),
]
TO_SERVER = [
    Ready(True, False),
    Part(1, b"body", False, 418, "Teapot", [("a", "b")]),
    Failed([1], 503, "Prediction failed", "Traceback"),
    Samples([("name", "gauge", "ms", 1.5, [("Level", "Model")], "r-1")]),
]


def feed(buffer: FrameBuffer, data: bytes, step: int) -> list[bytes]:
    payloads = []
    while data:
        space = buffer.space()
        count = min(step, len(space), len(data))
        space[:count] = data[:count]
        data = data[count:]
        payloads += [bytes(payload) for payload in buffer.filled(count)]
    return payloads


def test_messages_are_equal_after_encoding_and_decoding():
    for messages, decode in ((TO_WORKER, decode_to_worker), (TO_SERVER, decode_to_server)):
        frame = to_frame(messages)
        assert decode(memoryview(frame)[PREFIX:]) == messages


@given(
    sizes=st.lists(st.integers(0, 3 * ROOM), max_size=8),
    step=st.sampled_from([1000, 4096, 65536, ROOM - 1, ROOM, 10 * ROOM]),
)
def test_frames_come_out_whole_however_they_arrive(sizes, step):
    frames = [to_frame([Part(i, b"x" * size)]) for i, size in enumerate(sizes)]
    payloads = feed(FrameBuffer(10 * ROOM), b"".join(frames), step)
    assert payloads == [frame[PREFIX:] for frame in frames]


def test_frame_split_at_every_byte():
    data = to_frame(TO_SERVER) * 3
    for step in range(1, 40):
        assert len(feed(FrameBuffer(ROOM), data, step)) == 3


def test_buffer_gives_back_the_room_of_a_long_frame():
    buffer = FrameBuffer(10 * ROOM)
    feed(buffer, to_frame([Part(1, b"x" * 5 * ROOM)]), ROOM)
    assert len(buffer.space()) == ROOM


def test_frame_over_the_limit_is_rejected_before_it_is_read():
    with pytest.raises(BadFrame, match="at most 100"):
        feed(FrameBuffer(100), to_frame([Part(1, b"x" * 200)])[:10], 10)


@pytest.mark.parametrize("payload", [b"", b"\xc1\xc1", b"\x91\x00", b"\x91\x92\x63\x01", b"\xff" * 10])
def test_payload_that_is_no_message_is_rejected(payload):
    with pytest.raises(BadFrame):
        decode_to_server(memoryview(payload))


INVALID_TEXT = to_frame([Failed([1], 400, "\u00ff")]).replace("\u00ff".encode(), b"\xff\xfe")


@pytest.mark.parametrize("payload", [INVALID_TEXT[PREFIX:], b"\x91" * 100_000, b"\xc1", b"", b"\x91\xa1\xff"])
@pytest.mark.parametrize("decode", [decode_to_server, decode_to_worker])
def test_payload_that_is_no_message_is_a_bad_frame(decode, payload):
    with pytest.raises(BadFrame):
        decode(memoryview(payload))


@given(st.binary(max_size=200))
def test_any_payload_is_messages_or_a_bad_frame(payload):
    for decode in (decode_to_server, decode_to_worker):
        try:
            assert isinstance(decode(memoryview(payload)), list)
        except BadFrame:
            pass


async def test_text_that_is_not_utf_8_closes_the_channel_with_a_reason(ends):
    ours, theirs = ends
    received = []
    _, closed = await connect(ours, received.extend)
    theirs.sendall(INVALID_TEXT)
    reason = await asyncio.wait_for(closed, 10)
    assert reason.startswith("sent a malformed frame ('utf-8' codec can't decode byte 0xff")
    assert received == []


@pytest.mark.parametrize("method", ["receive", "poll"])
def test_worker_ends_with_a_sentence_at_a_malformed_frame(ends, method):
    ours, theirs = ends
    request = Request(1, "r\u00ff", [], b"")
    ours.sendall(to_frame([Run([request])]).replace("\u00ff".encode(), b"\xff\xfe"))
    worker = WorkerChannel(theirs, 1 << 20)
    with pytest.raises(SystemExit, match=r"^the server sent a malformed frame \('utf-8' codec"):
        getattr(worker, method)()


def test_closed_channel_frees_its_buffer_at_once():
    channel = ServerChannel(lambda messages: None, lambda reason: None, 1 << 20)
    assert len(channel.get_buffer(-1)) > 0
    channel.connection_lost(None)
    assert len(channel.get_buffer(-1)) == 0
