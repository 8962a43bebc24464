"""WebSockets of /predictions, with the official client and with hostile ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

import flambeau
from flambeau import websocket_frames as frames
from flambeau.config.server import Address, KeysConfig
from flambeau.errors import ApiError, CallTimedOut, NoConnection
from support.archives import pack_handler
from support.configured import ConfiguredServer, trusting
from support.running import HANDLERS, RunningServer, free_ports

SEQUENCES = {"sequenceBatching": True, "sequenceMaxIdleMSec": 60_000, "maxNumSequence": 2, "maxSequenceJobQueueSize": 4}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sockets")
    store = folder / "store"
    store.mkdir()
    pack_handler(store, "streamer")
    pack_handler(store, "echo")
    pack_handler(store, "faulty")
    pack_handler(store, "summing", config=json.dumps(SEQUENCES))
    pack_handler(store, "duplex", config=json.dumps({**SEQUENCES, "continuousBatching": True, "batchSize": 4}))
    (store / "model-config.yaml").unlink()  # packed; here it would make the store a model
    running = RunningServer(folder / "log", str(store), "--max-request-size", "200000", "--access-log").wait_ready()
    yield running
    running.stop()


def address(server, path):
    return f"ws://127.0.0.1:{server.port}{path}"


def reply_to(ws, message):
    """The parts of the reply to a message."""
    ws.send(message)
    return read_reply(ws)


def read_reply(ws):
    parts = []
    while part := ws.recv(timeout=60):
        parts.append(part)
    return parts


def test_each_part_of_a_reply_is_a_message_and_an_empty_one_ends_it(server):
    with connect(address(server, "/predictions/streamer")) as ws:
        for count in (3, 1, 5):
            parts = reply_to(ws, json.dumps({"n": count}))
            assert [part.split()[0] for part in parts] == [str(i) for i in range(count)]


def test_parts_arrive_while_the_handler_goes_on(server, tmp_path):
    gate = tmp_path / "gate"
    with connect(address(server, "/predictions/streamer")) as ws:
        ws.send(json.dumps({"n": 2, "until": str(gate)}))
        assert ws.recv(timeout=60).startswith("0 ")
        gate.touch()
        assert ws.recv(timeout=60).startswith("1 ")


def test_messages_sent_ahead_are_answered_in_order(server):
    with connect(address(server, "/predictions/echo/1.0")) as ws:
        for i in range(40):
            ws.send(json.dumps([i]))
        assert [json.loads(read_reply(ws)[0])["row"]["body"] for _ in range(40)] == [[i] for i in range(40)]


def test_type_of_a_message_is_that_of_its_reply(server):
    with connect(address(server, "/predictions/echo")) as ws:
        assert json.loads(reply_to(ws, "plain")[0])["row"] == {"body": "plain"}
        assert json.loads(reply_to(ws, ' {"a": 1}')[0])["row"] == {"body": {"a": 1}}
        [binary] = reply_to(ws, b"\x00\x01")
        assert isinstance(binary, bytes)


def test_messages_of_a_stateful_model_are_one_sequence_that_ends_with_the_connection(server):
    for _ in range(4):  # more than maxNumSequence, one after another
        url = address(server, "/predictions/summing")
        with connect(url) as one, connect(url) as two:
            first = json.loads(reply_to(one, '{"add": 1}')[0])
            assert (first["sum"], first["start"]) == (1, "true")
            assert json.loads(reply_to(two, '{"add": 5}')[0])["sum"] == 5
            second = json.loads(reply_to(one, '{"add": 2}')[0])
            assert (second["sum"], second["start"]) == (3, None)
            assert second["sequence"] == first["sequence"]
            with connect(url) as third:  # both places are taken
                third.send("{}")
                with pytest.raises(ConnectionClosed) as caught:
                    third.recv(timeout=60)
                assert caught.value.rcvd.code == 4503


def test_full_queue_is_the_reason_of_the_close(tmp_path):
    running = RunningServer(tmp_path / "log", str(HANDLERS / "napper.py"), "--job-queue-size", "1")
    try:
        running.wait_ready()
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(connect(address(running, "/predictions/napper"))) for _ in range(4)]
            for ws in sockets:
                ws.send('{"sleep_s": 2}')
            reasons = []
            for ws in sockets:
                try:
                    read_reply(ws)
                except ConnectionClosed as closed:
                    reasons.append(closed.rcvd.reason)
        assert reasons
        assert {*reasons} == {'The queue of model "napper" is full: all 1 places are taken (jobQueueSize).'}
    finally:
        running.stop()


def test_message_reaches_a_handler_that_still_streams(server):
    with connect(address(server, "/predictions/duplex")) as ws:
        ws.send("a")
        assert [ws.recv(timeout=60) for _ in range(3)] == ["heard a\n"] * 3  # it would go on for ever
        ws.send("stop")
        found = [ws.recv(timeout=60)]
        while found.count("") < 2:  # both replies end
            found.append(ws.recv(timeout=60))
        assert found.count("stopping\n") == 1


def test_error_closes_with_its_status_and_the_cause(server):
    with connect(address(server, "/predictions/streamer")) as ws:
        ws.send(json.dumps({"n": 9, "fail at": 1}))
        assert ws.recv(timeout=60).startswith("0 ")
        with pytest.raises(ConnectionClosed) as caught:
            ws.recv(timeout=60)
    assert caught.value.rcvd.code == 4503
    assert caught.value.rcvd.reason.startswith("RuntimeError: broke in the middle")  # no words before the cause
    with connect(address(server, "/predictions/faulty")) as ws:
        ws.send('{"do": "exit"}')
        with pytest.raises(ConnectionClosed) as caught:
            ws.recv(timeout=60)
    assert caught.value.rcvd.code == 4500
    server.wait_ready()


def test_client_that_leaves_cancels_its_request(server, tmp_path):
    note = tmp_path / "note"
    with connect(address(server, "/predictions/streamer")) as ws:
        ws.send(json.dumps({"n": 100_000, "pause": 0.01, "note": str(note)}))
        assert ws.recv(timeout=60)
    assert server.until(lambda: note.exists() and note.read_text()) == "ended early"


def test_handshakes_are_refused_like_requests(server):
    for path, status in (("/predictions/nobody", 404), ("/predictions", 404), ("/nowhere", 404)):
        with pytest.raises(InvalidStatus) as caught, connect(address(server, path)):
            pass
        assert caught.value.response.status_code == status
    with (
        pytest.raises(InvalidStatus) as caught,
        connect(address(server, "/predictions/echo"), origin="http://evil.example"),
    ):
        pass
    assert caught.value.response.status_code == 403
    with connect(address(server, "/predictions/echo"), origin="http://localhost:3000") as ws:
        assert reply_to(ws, "a")


def test_ping_is_answered_and_a_normal_close_is_returned(server):
    with connect(address(server, "/predictions/echo")) as ws:
        assert ws.ping().wait(60)
        ws.close(4999, "bye")
    assert ws.close_code == 4999
    assert server.logged("GET /predictions/echo", " 101 ")


# ---- the Python client ----


def test_python_client_talks_in_sessions(server, tmp_path):
    with flambeau.Client(server.url) as client:
        with client.session("summing") as session:
            totals = [json.loads(part)["sum"] for number in (1, 2, 3) for part in session.ask({"add": number})]
            assert totals == [1, 3, 6]
        with client.session("streamer") as session:
            session.send({"n": 2})
            session.send({"n": 9, "fail at": 1})
            assert len([*session.parts()]) == 2
            with pytest.raises(ApiError, match="broke in the middle") as caught:
                list(session.parts())
            assert caught.value.status == 503
            server.until(lambda: caught.value.request_id in server.log)
        with pytest.raises(ApiError, match="Model not found: nobody"):
            client.session("nobody")
        with client.session("streamer", timeout_s=0.2) as session, pytest.raises(CallTimedOut):
            list(session.ask({"n": 2, "until": str(tmp_path / "gate")}))
    (tmp_path / "gate").touch()


async def test_async_python_client_sends_and_reads_at_the_same_time(server):
    async with flambeau.AsyncClient(server.url) as client, await client.session("echo") as session:

        async def send_all():
            for i in range(30):
                await session.send([i])

        async def read_all():
            replies = [[part async for part in session.parts()] for _ in range(30)]
            return [json.loads(part)["row"]["body"] for [part] in replies]

        _, found = await asyncio.gather(send_all(), read_all())
        assert found == [[i] for i in range(30)]
        assert [part async for part in session.ask("a")]


# ---- hostile clients ----

HANDSHAKE = (
    "GET /predictions/{model} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
)


def open_raw(server, model="echo", key=None):
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    raw.sendall(HANDSHAKE.format(model=model, key=key or frames.new_key()).encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        received = raw.recv(1)
        assert received, head
        head += received
    return raw, head


def close_code(raw):
    """The status that the server closes with."""
    reader = frames.FrameReader(max_bytes=1 << 20, is_masked=False)
    while data := raw.recv(4096):
        for frame in reader.feed(data):
            if frame.opcode == frames.CLOSE:
                raw.close()
                return frames.read_close(frame.payload)[0]
    return None


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frames.encode_frame(frames.TEXT, b"not masked"), 1002),
        (b"\xff\xff\xff\xff", 1002),
        (frames.encode_frame(frames.TEXT, b"\xff", is_masked=True), 1007),
        (b"\x82\xff" + struct.pack(">Q", 1 << 60), 1009),
        (frames.encode_frame(frames.CLOSE, b"\x00", is_masked=True), 1002),
    ],
    ids=["not masked", "unknown bits", "invalid text", "too big", "half a status"],
)
def test_what_breaks_the_protocol_is_closed_with_its_status(server, sent, code):
    raw, head = open_raw(server)
    assert head.startswith(b"HTTP/1.1 101 ")
    raw.sendall(sent)
    assert close_code(raw) == code


def test_handshake_without_a_key_is_a_bad_request(server):
    for key in ("short", "!!"):
        raw, head = open_raw(server, key=key)
        assert head.startswith(b"HTTP/1.1 400 ")
        raw.close()
    reply = server.request("GET", "/predictions/echo", headers={"Upgrade": "websocket", "Connection": "Upgrade"})
    assert (reply.status, reply.message[:28]) == (400, "The WebSocket version must b")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("\r\n\r\n", "\r\nContent-Length: 3\r\n\r\nabc", b"must have no body"),
        ("\r\n\r\n", "\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"must have no body"),
        ("HTTP/1.1", "HTTP/1.0", b"needs HTTP/1.1"),
        ("\r\n\r\n", "\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", b"two Sec-WebSocket-Key"),
    ],
    ids=["length", "chunked", "old version", "two keys"],
)
def test_ambiguous_handshake_is_a_bad_request(server, old, new, reason):
    request = HANDSHAKE.format(model="echo", key=frames.new_key()).replace(old, new)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
        raw.sendall(request.encode())
        reply = b""
        while data := raw.recv(4096):
            reply += data
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert reason in reply


def test_message_right_behind_the_handshake_is_answered(server):
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    message = frames.encode_frame(frames.TEXT, b"early", is_masked=True)
    raw.sendall(HANDSHAKE.format(model="echo", key=frames.new_key()).encode() + message)
    received = b""
    while b"early" not in received:
        data = raw.recv(4096)
        assert data
        received += data
    raw.close()


def test_client_that_does_not_read_pauses_its_stream_and_costs_others_nothing(server):
    raw, _ = open_raw(server, "streamer")
    order = json.dumps({"n": 1_000_000}).encode()
    raw.sendall(frames.encode_frame(frames.TEXT, order, is_masked=True))
    for _ in range(20):  # the others are served meanwhile
        with connect(address(server, "/predictions/echo")) as ws:
            assert reply_to(ws, os.urandom(1000))
    raw.close()
    server.wait_ready()


# ---- TLS, unix sockets, keys and the end of the server ----


def test_clients_reach_tls_ports_and_unix_sockets(tmp_path):
    where = {"inference": Address(port=free_ports(1)[0], is_tls=True), "management": Address(path=f"{tmp_path}/m.sock")}
    with RawServer(tmp_path, HANDLERS / "streamer.py", metrics=None, **where) as running:
        unix = f"unix:{tmp_path}/m.sock"
        with flambeau.Client(unix, management_url=unix) as client:
            client.wait_ready()
            assert [model["modelName"] for model in client.models.list()] == ["streamer"]
        url = str(where["inference"])
        with flambeau.Client(url, management_url=unix, tls=trusting()) as client:
            assert len([*client.stream("streamer", {"n": 3})]) == 3
            with client.session("streamer") as session:
                assert len([*session.ask({"n": 200})]) == 200
        with (
            flambeau.Client(url) as client,
            pytest.raises(NoConnection, match="self-signed certificate"),
        ):
            client.predict("streamer", {"n": 1})
        assert running.process.poll() is None


class RawServer(ConfiguredServer):
    """Its ports do not speak plain HTTP, so nothing waits for them."""

    def __enter__(self):
        return self


def test_keys_are_checked_and_a_page_sends_its_key_as_a_protocol(tmp_path):
    with ConfiguredServer(tmp_path, HANDLERS / "echo.py", keys=KeysConfig(is_on=True)) as running:
        keys = {name: entry["key"] for name, entry in json.loads((tmp_path / "key_file.json").read_bytes()).items()}
        key, url = keys["inference"], address(running, "/predictions/echo")
        with pytest.raises(InvalidStatus) as caught, connect(url):
            pass
        assert caught.value.response.status_code == running.request("POST", "/predictions/echo").status
        with connect(url, additional_headers={"Authorization": f"Bearer {key}"}) as ws:
            [row] = reply_to(ws, "a")
            assert key not in row
        with connect(url, subprotocols=["flambeau", f"flambeau.key.{key}"]) as ws:
            assert ws.subprotocol == "flambeau"
            assert reply_to(ws, "a")
            renewal = {"authorization": f"Bearer {keys['API']}"}
            assert running.manage("GET", "/token?type=inference", headers=renewal).status == 200
            with pytest.raises(ConnectionClosed) as closed:  # the old key has ended
                reply_to(ws, "a")
            assert closed.value.rcvd.code == 4400


def test_stopping_server_answers_what_it_has_accepted_and_says_that_it_goes(tmp_path):
    gate = tmp_path / "gate"
    with flambeau.serve(HANDLERS / "streamer.py", drain_timeout=30) as running:
        url = running.url.replace("http", "ws") + "/predictions/streamer"
        with connect(url) as busy, connect(url) as idle:
            busy.send(json.dumps({"n": 3, "until": str(gate)}))
            assert busy.recv(timeout=60).startswith("0 ")
            running.process.terminate()
            gate.touch()
            assert len(read_reply(busy)) == 2
            for ws in (busy, idle):
                with pytest.raises(ConnectionClosed) as caught:
                    ws.recv(timeout=60)
                assert caught.value.rcvd.code == frames.GOING_AWAY
        assert running.process.wait(60) == 0
