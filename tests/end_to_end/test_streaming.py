"""Replies in parts."""

from __future__ import annotations

import http.client
import json
import socket

import pytest

from support.archives import pack_handler
from support.held_requests import HeldRequests


def open_stream(server, model, order):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps(order).encode()
    connection.request("POST", f"/predictions/{model}", body, {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def test_each_chunk_is_sent_when_it_is_made(share, tmp_path):
    server = share("streamer.py")
    gate = tmp_path / "gate"
    connection, response = open_stream(server, "streamer", {"n": 10, "until": str(gate)})
    assert response.getheader("transfer-encoding") == "chunked"
    assert response.readline().split()[0] == b"0"  # the next one is not made before the gate opens
    gate.touch()
    assert [int(response.readline().split()[0]) for _ in range(9)] == [*range(1, 10)]
    assert response.read() == b""
    connection.close()


def test_client_that_goes_away_in_mid_stream_stops_the_handler(share, tmp_path):
    server = share("streamer.py")
    note = tmp_path / "note"
    connection, response = open_stream(server, "streamer", {"n": 100_000, "pause": 0.01, "note": str(note)})
    assert response.readline()
    response.close()
    connection.close()
    assert server.until(lambda: note.exists() and note.read_text()) == "ended early"
    assert server.predict("streamer", {"n": 2}).status == 200


def test_client_that_goes_away_while_it_waits_costs_no_work(start, tmp_path):
    server = start("faulty.py").wait_ready()
    held = HeldRequests(server, tmp_path).wait_running()
    body = b'{"do": "exit"}'
    head = b"POST /predictions/faulty HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    leaving = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
    for connection in leaving:
        connection.sendall(head % len(body) + body)
    server.until(lambda: num_waiting(server) == 5)
    for connection in leaving:
        connection.close()
    server.until(lambda: num_waiting(server) <= 1)  # one may have been sent ahead, and its worker is told
    assert [reply.status for reply in held.release()] == [200]
    assert server.predict("faulty", {"do": "answer"}).status == 200
    assert server.describe("faulty")["workers"][0]["restarts"] == 0


def num_waiting(server):
    return server.describe("faulty")["jobQueueStatus"]["pendingRequests"]


def test_stream_that_fails_in_the_middle_is_broken_off(start):
    server = start("streamer.py").wait_ready()
    for fault in ("fail at", "die at"):
        connection, response = open_stream(server, "streamer", {"n": 10, "pause": 0.02, fault: 3})
        assert response.readline().startswith(b"0 ")
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
        connection.close()
        server.wait_ready()
    assert "broke in the middle" in server.log


def test_stream_that_fails_before_its_first_part_is_an_ordinary_error(share):
    reply = share("streamer.py").predict("streamer", {"n": 10, "fail at": 0})
    assert reply.status == 503
    assert reply.message == "Prediction failed"


def test_streams_inside_a_batch_end_one_by_one(start):
    server = start("streams_in_list.py", "--batch-size", "4", "--max-batch-delay", "200").wait_ready()
    assert server.predict("streams_in_list", 2).headers["x-from"] == "inside"
    futures = server.at_once(lambda body: server.predict("streams_in_list", body), [3, "plain", 20, 1])
    assert futures[0].result().body == b"0,1,2,"
    assert futures[1].result().body == b"plain"
    assert futures[3].result().body == b"0,"
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        futures[2].result()


def test_async_generators_stream(share):
    reply = share("async_streamer.py").predict("async_streamer", {})
    assert reply.body == b"0 1 2 3 4 "
    assert reply.headers["transfer-encoding"] == "chunked"


def test_http_1_0_client_gets_a_stream_that_ends_with_the_connection(share):
    server = share("async_streamer.py")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /predictions/async_streamer HTTP/1.0\r\n\r\n")
        received = b""
        while data := connection.recv(65536):
            received += data
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert body == b"0 1 2 3 4 "


def test_a_chunk_may_go_to_one_request_of_a_batch(start, tmp_path):
    config = "batchSize: 2\nmaxBatchDelay: 5000\nminWorkers: 1\nmaxWorkers: 1\n"
    server = start(pack_handler(tmp_path, "halves", config=config)).wait_ready()
    replies = server.at_once(lambda body: server.predict("halves", body), [b"left", b"right"])
    assert [reply.result().body for reply in replies] == [b"first left,last of 2", b"first right,last of 2"]


def test_async_handlers_send_chunks_to_their_own_requests(start):
    server = start("async_chunks.py").wait_ready()
    replies = server.at_once(lambda body: server.predict("async_chunks", body), [b"a", b"b", b"c"])
    assert [reply.result().body for reply in replies] == [f"{x}0 {x}1 {x}2 end".encode() for x in "abc"]


# ---- server-sent events ----


def open_events(server, model, order, accept="text/event-stream"):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json", "Accept": accept}
    connection.request("POST", f"/predictions/{model}", json.dumps(order).encode(), headers)
    return connection, connection.getresponse()


def read_event(response):
    """The lines of one event."""
    lines = []
    while (line := response.readline().decode()) not in ("\n", ""):
        lines.append(line.rstrip("\n"))
    return lines


def test_each_part_is_an_event_when_the_client_accepts_them(share, tmp_path):
    server = share("streamer.py")
    gate = tmp_path / "gate"
    connection, response = open_events(server, "streamer", {"n": 3, "until": str(gate)})
    assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
    first = read_event(response)
    assert (first[0].split()[:2], first[1:]) == (["data:", "0"], ["data: "])  # the part ends with a line break
    gate.touch()
    assert [read_event(response)[0].split()[1] for _ in range(2)] == ["1", "2"]
    assert read_event(response) == ["event: end", "data: {}"]
    assert response.read() == b""
    connection.close()


@pytest.mark.parametrize("fault", ["fail at", "die at"])
def test_stream_of_events_that_fails_ends_with_an_error_event(share, fault):
    server = share("streamer.py")
    connection, response = open_events(server, "streamer", {"n": 10, "pause": 0.02, fault: 2})
    events = []
    while event := read_event(response):
        events.append(event)
    assert [event[0].split()[1] for event in events[:2]] == ["0", "1"]
    assert events[-1][0] == "event: error"
    error = json.loads(events[-1][1].removeprefix("data: "))["error"]
    assert error["code"] == (503 if fault == "fail at" else 500)
    connection.close()
    server.wait_ready()


def test_without_such_an_accept_header_a_stream_is_as_before(share):
    server = share("streamer.py")
    for accept in ("*/*", "text/event-stream;q=0", "application/json"):
        connection, response = open_events(server, "streamer", {"n": 2}, accept)
        assert response.getheader("content-type") is None
        assert response.read().count(b"data:") == 0
        connection.close()
    connection, response = open_events(server, "streamer", {"n": 10, "fail at": 0})
    assert (response.status, response.getheader("content-type")) == (503, "application/json")
    connection.close()
