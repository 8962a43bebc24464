"""TorchServe's worker protocol, byte for byte."""

from __future__ import annotations

import socket
import struct

import pytest

from flambeau.torchserve.worker_protocol.protocol import (
    create_load_model_response,
    create_predict_response,
    encode_response_headers,
    retrieve_msg,
)
from flambeau.worker.context import Context, RequestProcessor


def integer(number: int) -> bytes:
    return struct.pack("!i", number)


def text(value: bytes) -> bytes:
    return integer(len(value)) + value


END = integer(-1)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.fixture
def context():
    context = Context("m", ".", None, 2, None, "1")
    context.request_ids = {0: "a", 1: "b"}
    context.request_processor = [RequestProcessor({}), RequestProcessor({})]
    return context


@pytest.mark.parametrize("gpu", [-1, 3])
def test_a_load_is_read(pair, gpu):
    ours, theirs = pair
    theirs.sendall(
        b"L" + text(b"name") + text(b"/path") + integer(4) + text(b"h.py") + integer(gpu) + text(b"json") + b"\x00"
    )
    command, message = retrieve_msg(ours)
    assert command == b"L"
    expected = {"modelName": b"name", "modelPath": b"/path", "batchSize": 4, "handler": b"h.py"}
    expected |= {"envelope": b"json", "limitMaxImagePixels": False}
    assert message == (expected if gpu < 0 else {**expected, "gpu": 3})


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        (b"application/json", b'{"a": 1}', {"a": 1}),
        (b"application/json; charset=utf-8", b"[2]", [2]),
        (b"application/json", b"{", bytearray(b"{")),
        (b"text/plain", "Zoë".encode(), "Zoë"),
        (b"text/plain", b"\xff", bytearray(b"\xff")),
        (b"", b"raw", bytearray(b"raw")),
    ],
)
def test_a_batch_is_read_with_values_by_their_types(pair, kind, raw, value):
    ours, theirs = pair
    request = text(b"id") + text(b"x-a") + text(b"1") + END + text(b"body") + text(kind) + text(raw) + END
    theirs.sendall(b"I" + request + END)
    command, [message] = retrieve_msg(ours)
    assert command == b"I"
    assert message["requestId"] == b"id"
    assert message["headers"] == [{"name": b"x-a", "value": b"1"}]
    assert message["parameters"] == [{"name": "body", "contentType": kind.decode(), "value": value}]


def test_nothing_is_decoded_when_decoding_is_off(pair, monkeypatch):
    monkeypatch.setenv("TS_DECODE_INPUT_REQUEST", "false")
    ours, theirs = pair
    theirs.sendall(b"I" + text(b"i") + END + text(b"body") + text(b"application/json") + text(b"1") + END + END)
    assert retrieve_msg(ours)[1][0]["parameters"][0]["value"] == b"1"


def test_unknown_commands_are_rejected_and_a_lost_peer_ends_the_process(pair):
    ours, theirs = pair
    theirs.sendall(b"U")
    with pytest.raises(ValueError, match="Invalid command: b'U'"):
        retrieve_msg(ours)
    theirs.close()
    with pytest.raises(SystemExit) as stopped:
        retrieve_msg(ours)
    assert stopped.value.code == 0


def test_answers_are_written():
    assert create_load_model_response(200, "ok") == integer(200) + text(b"ok") + END
    plain = integer(200) + text(b"done") + text(b"a") + text(b"") + integer(200) + text(b"") + integer(0)
    assert create_predict_response(["x"], {0: "a"}, "done", 200) == plain + text(b"x") + END
    assert create_predict_response(None, {0: "a"}, "done", 200) == plain + text(b"error") + END
    assert encode_response_headers({"a": "ü"}) == integer(1) + text(b"a") + text("ü".encode())


def test_a_context_brings_status_phrase_and_headers(context):
    context.set_response_content_type(1, "text/css")
    context.set_response_status(418, "teapot", 1)
    written = create_predict_response([b"x", {"a": 1}], {1: "b"}, "done", 200, context)
    head = integer(200) + text(b"done") + text(b"b") + text(b"text/css") + integer(418) + text(b"teapot")
    assert written == head + encode_response_headers({"content-type": "text/css"}) + text(b'{\n  "a": 1\n}') + END


def test_a_result_that_cannot_be_encoded_fails_the_batch(context):
    written = create_predict_response([object(), "x"], {0: "a", 1: "b"}, "done", 200, context)
    assert written.startswith(integer(503) + text(b"Unsupported model output data type."))


def test_the_marker_of_streams(context):
    def marks():
        return [context.get_response_headers(i).get("ts_stream_next") for i in range(2)]

    ids = {0: "a", 1: "b"}
    create_predict_response(["x", "y"], ids, "done", 200, context)
    assert marks() == [None, None]
    create_predict_response(["x", "y"], ids, "chunk", 200, context, True)
    assert marks() == ["true", "true"]
    create_predict_response(["x", "y"], ids, "done", 200, context)
    assert marks() == ["false", "false"]
    context.stopping_criteria = [lambda value: value == "stop", lambda value: None]
    create_predict_response(["go", "y"], ids, "done", 200, context)
    assert marks() == ["true", "false"]
    create_predict_response(["stop", "y"], ids, "done", 200, context)
    assert marks() == ["false", "false"]


def test_only_the_first_rank_answers(context, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert create_predict_response(["x"], {0: "a"}, "done", 200, context) is None
