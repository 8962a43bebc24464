"""Limits on bodies, queues and time; SIGTERM; odd HTTP."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import time

import pytest

from flambeau.cli.lifecycle import SAME_SIGNAL_S
from support.archives import pack_handler
from support.held_requests import HeldRequests
from support.running import Load


def test_body_over_the_limit_is_413_before_it_is_read(share):
    server = share("echo.py", "--max-request-size", "1000")
    reply = server.predict("echo", b"x" * 1001)
    assert (reply.status, reply.json["code"]) == (413, 413)
    assert "max_request_size" in reply.message
    assert server.predict("echo", b"x" * 1000).status == 200


def test_large_body_over_the_limit_still_reads_its_answer(share):
    server = share("echo.py", "--max-request-size", "1000")
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /predictions/echo HTTP/1.1\r\nContent-Length: 5000000\r\n\r\n")
        client.sendall(b"x" * 200_000)
        assert client.recv(65536).startswith(b"HTTP/1.1 413")


def test_chunked_body_over_the_limit_is_413(share):
    server = share("echo.py", "--max-request-size", "1000")
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/predictions/echo", iter([b"x" * 600, b"x" * 600]), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_chunked_body_under_the_limit_arrives_whole(share):
    server = share("echo.py")
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/predictions/echo", iter([b"a" * 600, b"b" * 600]), encode_chunked=True)
    assert b"a" * 600 + b"b" * 600 in connection.getresponse().read()
    connection.close()


def test_expect_continue_is_honored(share):
    server = share("echo.py")
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /predictions/echo HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 100 Continue")
        client.sendall(b"hi")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_answered_in_order(start):
    server = start("faulty.py", "--workers", "2").wait_ready()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        for order in (b'{"do": "sleep", "s": 0.3}', b'{"do": "answer", "value": 1}', b'{"do": "answer", "value": 2}'):
            head = b"POST /predictions/faulty HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            client.sendall(head % len(order) + order)
        received = b""
        while received.count(b"HTTP/1.1 200") < 3 or not received.endswith(b"}\n"):
            received += client.recv(65536)
    assert received.index(b'"slept"') < received.index(b'"value": 1') < received.index(b'"value": 2')


def test_two_large_bodies_on_one_connection(share):
    server = share("echo.py")
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    for letter in (b"a", b"b"):
        connection.request("POST", "/predictions/echo", letter * 1_000_000)
        assert letter * 1_000_000 in connection.getresponse().read()
    connection.close()


def test_rubbish_instead_of_http_is_400(share):
    server = share("echo.py")
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"\x16\x03\x01 this is not http\r\n\r\n")
        received = client.recv(65536)
    assert received.startswith(b"HTTP/1.1 400")
    assert b"Invalid HTTP message." in received
    assert server.predict("echo", {}).status == 200


def test_rubbish_behind_a_request_does_not_cost_its_answer(share):
    server = share("faulty.py")
    body = b'{"do": "sleep", "s": 0.3}'
    head = b"POST /predictions/faulty HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head % len(body) + body + b"\x00\x01 rubbish\r\n\r\n")
        received = b""
        while data := client.recv(65536):
            received += data
    assert received.startswith(b"HTTP/1.1 200")
    assert b'"slept"' in received
    assert received.count(b"HTTP/1.1") == 2
    assert b"HTTP/1.1 400" in received


def test_wish_to_upgrade_is_declined_by_answering(share):
    server = share("echo.py")
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABk"}
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    for method, body in (("GET", None), ("POST", b"[1]"), ("POST", b"[2]")):
        connection.request(method, "/predictions/echo", body, {**headers, "Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert (body or b"") in response.read().replace(b"\n", b"").replace(b" ", b"")
    connection.request("CONNECT", "example.com:443")
    assert connection.getresponse().status == 400
    connection.close()


def open_files(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def test_large_bodies_that_are_not_needed_leave_nothing_behind(start):
    server = start("echo.py").wait_ready()
    body = b"x" * 300_000
    for path in ("/predictions/nobody", "/ping", "/nowhere", "/predictions/echo"):
        server.request("POST", path, body)
    before = open_files(server)
    for _ in range(20):
        for path in ("/predictions/nobody", "/ping", "/nowhere", "/predictions/echo/9"):
            server.request("POST", path, body)
        server.request("OPTIONS", "/predictions/echo", body)
        server.manage("POST", "/models", body)
        with socket.create_connection(("127.0.0.1", server.port)) as client:  # gone in the middle of it
            client.sendall(b"POST /predictions/echo HTTP/1.1\r\nContent-Length: 300000\r\n\r\nxxx")
    server.until(lambda: open_files(server) <= before + 2)


def test_many_quick_requests_behind_a_slow_one(share):
    server = share("faulty.py")
    body = b'{"do": "sleep", "s": 0.5}'
    head = b"POST /predictions/faulty HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head % len(body) + body + b"GET /ping HTTP/1.1\r\n\r\n" * 300)
        received = b""
        while received.count(b"HTTP/1.1 200") < 301:
            received += client.recv(65536)
    assert received.index(b'"slept"') < received.index(b'"Healthy"')


def test_responses_without_a_body_do_not_disturb_the_next_one(start):
    server = start("faulty.py", "streamer.py").wait_ready()
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    kind = {"Content-Type": "application/json"}
    for method, path, body, status in (
        ("POST", "/predictions/faulty", b'{"do": "no content"}', 204),
        ("HEAD", "/predictions/streamer", b'{"n": 3}', 200),
        ("POST", "/predictions/faulty", b'{"do": "answer"}', 200),
    ):
        connection.request(method, path, body, kind)
        response = connection.getresponse()
        assert (response.status, bool(response.read())) == (status, method == "POST" and status == 200)
    connection.close()


def test_reply_larger_than_any_buffer_arrives_whole(start):
    server = start("faulty.py", "--max-response-size", "100000000").wait_ready()
    assert len(server.predict("faulty", {"do": "huge", "bytes": 80_000_000}).body) == 80_000_000


@pytest.mark.parametrize("start_line", [b"GET /ping HTTP/1.1\r\nX-Endless: ", b"GET /"])
def test_one_endless_header_or_path_is_refused(share, start_line):
    server = share("echo.py")
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(start_line)
        try:
            for _ in range(100):
                client.sendall(b"x" * 10_000)
        except ConnectionError:
            return
        assert client.recv(65536).startswith(b"HTTP/1.1 4")


def test_form_with_too_many_fields_is_refused(share):
    reply = share("echo.py").predict(
        "echo", b"&".join(b"f%d=1" % i for i in range(1001)), kind="application/x-www-form-urlencoded"
    )
    assert reply.status == 400
    assert "1000 fields" in reply.message


def test_head_that_never_ends_is_refused(share):
    server = share("echo.py")
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /ping HTTP/1.1\r\n")
        try:
            for i in range(200):
                client.sendall(b"X-Header-%d: %s\r\n" % (i, b"y" * 1000))
        except ConnectionError:
            return
        assert client.recv(65536).startswith(b"HTTP/1.1 4")


def test_full_queue_is_503_with_retry_after(start, tmp_path):
    server = start("faulty.py", "--job-queue-size", "2").wait_ready()
    held = HeldRequests(server, tmp_path, 8)
    server.until(lambda: sum(future.done() for future in held.futures) >= 5)
    replies = held.release()
    statuses = sorted(reply.status for reply in replies)
    assert statuses == [200] * 3 + [503] * 5
    refused = next(reply for reply in replies if reply.status == 503)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.message.startswith('The queue of model "faulty" is full: all 2 places are taken')
    assert "--job-queue-size" in refused.message


def test_late_requests_fail_and_never_reach_a_worker(start, tmp_path):
    model = pack_handler(tmp_path, "faulty", config="clientTimeoutInMills: 300\nminWorkers: 1\nmaxWorkers: 1\n")
    server = start(model).wait_ready()
    held = HeldRequests(server, tmp_path).wait_running()
    reply = server.predict("faulty", {"do": "exit"})
    assert (reply.status, reply.json["type"]) == (408, "RequestTimeoutException")
    assert [reply.status for reply in held.release()] == [408]
    server.until(lambda: server.predict("faulty", {"do": "answer"}).status == 200)
    assert server.describe("faulty")["workers"][0]["restarts"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_answers_everything_that_was_accepted(start, tmp_path, number):
    server = start("faulty.py").wait_ready()
    held = HeldRequests(server, tmp_path, 5).wait_running()
    server.until(lambda: server.describe("faulty")["jobQueueStatus"]["pendingRequests"] == 4)
    server.process.send_signal(number)
    server.until(lambda: not server._connects())
    assert [reply.status for reply in held.release()] == [200] * 5
    assert server.process.wait(60) == 0


def test_sigterm_under_load_loses_no_accepted_request(start):
    server = start("faulty.py", "--workers", "2", "--job-queue-size", "1000").wait_ready()
    with Load(lambda: server.predict("faulty", {"do": "sleep", "s": 0.002}), threads=8) as load:
        server.until(lambda: len(load.replies) > 50)
        server.stop(timeout=60)
    assert load.replies
    assert {reply.status for reply in load.replies} == {200}
    # Refused connections are fine: nobody had accepted those.
    assert all(isinstance(error, (ConnectionRefusedError, ConnectionResetError)) for error in load.errors), load.errors


def test_readiness_goes_first_when_stopping(start, tmp_path):
    server = start("faulty.py").wait_ready()
    keep = http.client.HTTPConnection("127.0.0.1", server.port)

    def readiness():
        keep.request("GET", "/readyz")
        reply = keep.getresponse()
        return reply.status, reply.getheader("connection"), reply.read()

    assert readiness()[0] == 200
    held = HeldRequests(server, tmp_path).wait_running()
    server.process.send_signal(signal.SIGTERM)
    status, connection, body = server.until(lambda: (answer := readiness())[0] != 200 and answer)
    keep.close()
    assert (status, connection) == (503, "close")
    assert b"draining" in body
    assert [reply.status for reply in held.release()] == [200]
    assert server.process.wait(60) == 0


def test_second_signal_does_not_wait(start, tmp_path):
    server = start("faulty.py", "--drain-timeout", "300").wait_ready()
    HeldRequests(server, tmp_path).wait_running()
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: not server._connects())
    time.sleep(SAME_SIGNAL_S)
    server.stop(timeout=60)


def test_signal_that_arrives_twice_at_once_is_one(start, tmp_path):
    server = start("faulty.py", "--drain-timeout", "300").wait_ready()
    held = HeldRequests(server, tmp_path, 3).wait_running()
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.005)  # two that are pending at the same time are one anyway
    server.process.send_signal(signal.SIGTERM)
    server.process.send_signal(signal.SIGINT)
    server.until(lambda: not server._connects())
    assert [reply.status for reply in held.release()] == [200] * 3
    assert server.process.wait(60) == 0


def test_drain_that_takes_too_long_ends(start, tmp_path):
    server = start("faulty.py", "--drain-timeout", "1").wait_ready()
    held = HeldRequests(server, tmp_path).wait_running()
    server.stop(timeout=60)
    assert held.futures[0].exception() or held.futures[0].result().status >= 500


def test_nothing_is_left_on_disk_or_running(start, tmp_path):
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    server = start(pack_handler(tmp_path, "echo"), env={"TMPDIR": str(scratch)}).wait_ready()
    pid = server.worker_pids("echo")[0]
    assert [*scratch.iterdir()]
    server.stop()
    assert not [*scratch.iterdir()]
    assert not os.path.exists(f"/proc/{pid}")
