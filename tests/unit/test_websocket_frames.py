"""Frames of WebSockets: what is encoded is read back, and what breaks the protocol is refused with its status."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flambeau import websocket_frames as frames
from flambeau.websocket_frames import FrameError, FrameReader, encode_frame


def reader(max_bytes=1 << 20):
    return FrameReader(max_bytes=max_bytes, is_masked=True)


def test_key_of_the_specification_is_answered_as_there():
    assert frames.accept_key("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert frames.is_key(frames.new_key())
    assert not frames.is_key("short")


@given(st.lists(st.binary(max_size=70_000), max_size=4), st.integers(1, 5000))
def test_messages_are_read_in_whatever_pieces_they_arrive(messages, size):
    data = b"".join(encode_frame(frames.BINARY, message, is_masked=True) for message in messages)
    found, receiver = [], reader()
    for start in range(0, len(data), size):
        found += receiver.feed(data[start : start + size])
    assert [frame.payload for frame in found] == messages
    assert not receiver.is_reading


def test_fragments_make_one_message_with_control_frames_between():
    def fragment(first, payload):
        return bytes((first, 0x80 | len(payload))) + b"\0\0\0\0" + payload

    data = fragment(0x01, b"ab") + encode_frame(frames.PING, b"?", is_masked=True) + fragment(0x80, b"cd")
    assert [*reader().feed(data)] == [(frames.PING, b"?"), (frames.TEXT, b"abcd")]


def test_frames_are_read_a_few_at_a_time():
    receiver = reader()
    receiver.push(b"".join(encode_frame(frames.PING, bytes([i]), is_masked=True) for i in range(5)) + b"\x89")
    found = []
    while receiver.has_more:
        found.append([frame.payload[0] for frame in receiver.frames(2)])
    assert found == [[0, 1], [2, 3], [4]]
    assert (receiver.is_reading, receiver.held_bytes, receiver.num_finished) == (True, 1, 5)


@given(st.integers(500, 40_000), st.integers(0, 3))
def test_large_frames_are_unmasked_while_they_arrive(size, num_more):
    parts = [bytes(range(256)) * 200, b"", bytes(range(255, -1, -1)) * 250 + b"abc"[:num_more]]
    coded = [encode_frame(frames.BINARY, part, is_masked=True) for part in parts]
    data = bytes([0x02]) + coded[0][1:] + bytes([0x00]) + coded[1][1:] + bytes([0x80]) + coded[2][1:]
    data += encode_frame(frames.PING, b"?", is_masked=True)
    receiver, found = reader(), []
    for start in range(0, len(data), size):
        found += receiver.feed(data[start : start + size])
    assert found == [(frames.BINARY, b"".join(parts)), (frames.PING, b"?")]
    assert (receiver.is_reading, receiver.held_bytes) == (False, 0)


BAD = {
    "not masked": (encode_frame(frames.TEXT, b"x"), frames.PROTOCOL_ERROR),
    "extension": (b"\xc1\x80\0\0\0\0", frames.PROTOCOL_ERROR),
    "unknown type": (b"\x83\x80\0\0\0\0", frames.PROTOCOL_ERROR),
    "long ping": (b"\x89\xfe\x00\x7e", frames.PROTOCOL_ERROR),
    "ping in fragments": (b"\x09\x80\0\0\0\0", frames.PROTOCOL_ERROR),
    "continuation of nothing": (b"\x80\x80\0\0\0\0", frames.PROTOCOL_ERROR),
    "text within a message": (b"\x01\x80\0\0\0\0\x01\x80\0\0\0\0", frames.PROTOCOL_ERROR),
    "invalid text": (encode_frame(frames.TEXT, b"\xff", is_masked=True), frames.INVALID_TEXT),
    "long length of 2 bytes": (b"\x82\xfe\x00\x7d", frames.PROTOCOL_ERROR),
    "long length of 8 bytes": (b"\x82\xff" + (65535).to_bytes(8, "big"), frames.PROTOCOL_ERROR),
    "endless fragments": (b"\x02\x80\0\0\0\0" + b"\x00\x81\0\0\0\0x" * (frames.MAX_FRAGMENTS + 20), frames.POLICY),
    "too big": (b"\x82\xff" + (1 << 40).to_bytes(8, "big"), frames.TOO_BIG),
    "fragments too big": (
        b"\x02\xfe\x80\x00\0\0\0\0" + b"x" * (1 << 15) + b"\x80\xff" + (1 << 20).to_bytes(8, "big"),
        1009,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_breaks_the_protocol_is_refused_with_its_status(name):
    data, code = BAD[name]
    with pytest.raises(FrameError) as caught:
        list(reader().feed(data))
    assert caught.value.code == code


def test_close_frames_carry_a_status_and_a_reason_that_fits():
    assert frames.read_close(frames.close_payload(4503, "ü" * 100)) == (4503, "ü" * 61)
    assert frames.read_close(b"") == (frames.NO_STATUS, "")
    for payload in (b"\x03", b"\x03\xed", b"\x00\x01"):
        with pytest.raises(FrameError):
            frames.read_close(payload)
