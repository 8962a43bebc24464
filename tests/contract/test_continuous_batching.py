"""Continuous batching: requests join and leave a running batch between calls of the handler."""

from __future__ import annotations

import json
import os
import signal
import socket

import pytest

from support.archives import pack_handler
from support.streams import Stream

CONFIG = "continuousBatching: true\nminWorkers: {workers}\nmaxWorkers: {workers}\nbatchSize: {size}\n"


def serve(start, folder, *, size=4, workers=1, more="", **options):
    config = CONFIG.format(size=size, workers=workers) + more
    model = pack_handler(folder, "stepping", config=config)
    return start(model, **options).wait_ready()


@pytest.fixture(scope="module")
def server(share, tmp_path_factory):
    """A server for the tests whose worker lives on."""
    return share(
        str(pack_handler(tmp_path_factory.mktemp("model"), "stepping", config=CONFIG.format(size=4, workers=1)))
    )


def test_stream_is_chunked_and_ends_where_the_criterion_says(server):
    stream = Stream(server, "stepping", {"n": 3, "mine": "yes"}, [("x-mine", "yes")])
    response = stream.begin()
    assert response.status == 200
    assert response.getheader("transfer-encoding") == "chunked"
    assert response.getheader("ts_stream_next") == "true"
    assert [line["step"] for line in stream.rest()] == [1, 2, 3]


def test_first_message_that_is_final_is_a_plain_response(server):
    for order in ({"n": 1}, {"n": 1, "whole": True}, {"n": 1, "status": 418}):
        reply = server.predict("stepping", order)
        assert reply.status == order.get("status", 200)
        assert "transfer-encoding" not in reply.headers
        assert int(reply.headers["content-length"]) == len(reply.body)
        assert reply.json["step"] == 1


def test_requests_join_a_running_batch_and_leave_it_when_they_are_done(server):
    long = Stream(server, "stepping", {"n": 2000, "pause": 0.005})
    assert long.line()["batch"] == 1
    short = server.predict("stepping", {"n": 3})
    steps = [json.loads(line) for line in short.body.splitlines()]
    assert [step["batch"] for step in steps] == [2, 2, 2]
    assert [step["call"] for step in steps] == [*range(steps[0]["call"], steps[0]["call"] + 3)]
    server.until(lambda: long.line()["batch"] == 1)
    long.leave()


def test_batch_never_grows_beyond_its_places_and_everyone_is_served(start, tmp_path):
    server = serve(start, tmp_path, size=2)
    futures = server.at_once(lambda n: server.predict("stepping", {"n": n, "pause": 0.002}), [5, 9, 3, 7, 1, 8])
    for n, future in zip([5, 9, 3, 7, 1, 8], futures, strict=True):
        steps = [json.loads(line) for line in future.result().body.splitlines()]
        assert [step["step"] for step in steps] == [*range(1, n + 1)]
        assert max(step["batch"] for step in steps) <= 2


def test_client_that_leaves_gives_up_its_place(start, tmp_path):
    server = serve(start, tmp_path, size=1)
    long = Stream(server, "stepping", {"n": 100_000, "pause": 0.002})
    assert long.line()["step"] == 1
    long.leave()
    assert server.predict("stepping", {"n": 2}).status == 200


def test_client_that_leaves_the_queue_is_never_run(start, tmp_path):
    server = serve(start, tmp_path, size=1)
    long = Stream(server, "stepping", {"n": 100_000, "pause": 0.002})
    assert long.line()["step"] == 1
    waiting = Stream(server, "stepping", {"exit": 1})
    server.until(lambda: server.describe("stepping")["jobQueueStatus"]["pendingRequests"] == 1)
    waiting.leave()
    server.until(lambda: server.describe("stepping")["jobQueueStatus"]["pendingRequests"] == 0)
    long.leave()
    assert server.predict("stepping", {"n": 1}).status == 200
    assert server.describe("stepping")["workers"][0]["restarts"] == 0


def test_exception_fails_the_running_batch_and_the_worker_goes_on(server):
    long = Stream(server, "stepping", {"n": 100_000, "pause": 0.002})
    first = long.line()
    failed = server.predict("stepping", {"n": 3, "raise": 1})
    assert (failed.status, failed.json["message"].startswith("Prediction failed: ")) == (503, True)
    assert long.is_broken_off()
    after = server.predict("stepping", {"n": 1})
    assert after.json["pid"] == first["pid"]


def test_request_that_cannot_be_read_fails_alone(server):
    long = Stream(server, "stepping", {"n": 300, "pause": 0.002})
    assert long.line()["step"] == 1
    bad = server.predict("stepping", b"--x", kind="multipart/form-data")
    assert bad.status == 400
    assert len(long.rest()) == 299


def test_worker_that_dies_in_a_running_batch_is_replaced(start, tmp_path):
    server = serve(start, tmp_path)
    long = Stream(server, "stepping", {"n": 100_000, "pause": 0.01})
    pid = long.line()["pid"]
    os.kill(pid, signal.SIGKILL)
    assert long.is_broken_off()
    assert server.predict("stepping", {"n": 1}).json["pid"] != pid
    killer = server.predict("stepping", {"n": 2, "exit": 1})
    assert (killer.status, killer.json["message"].startswith("Worker died: ")) == (500, True)
    assert server.predict("stepping", {"n": 1}).status == 200


def test_handler_that_hangs_in_a_step_is_ended(start, tmp_path):
    server = serve(start, tmp_path, more="responseTimeout: 1\n")
    reply = server.predict("stepping", {"n": 2, "pause": 60})
    assert (reply.status, reply.json["message"].startswith("Worker died: ")) == (500, True)
    assert server.predict("stepping", {"n": 1}).status == 200


def test_many_steps_may_take_longer_than_the_response_timeout(start, tmp_path):
    server = serve(start, tmp_path, more="responseTimeout: 1\n")
    reply = server.predict("stepping", {"n": 8, "pause": 0.25})
    assert len(reply.body.splitlines()) == 8


def test_request_that_waits_for_a_long_step_is_not_taken_for_a_silent_one(start, tmp_path):
    server = serve(start, tmp_path, more="responseTimeout: 4\n")
    note = tmp_path / "note"
    first = server.at_once(lambda n: server.predict("stepping", {"n": n, "pause": 3, "note": str(note)}), [1])
    server.until(note.exists)
    second = server.at_once(lambda n: server.predict("stepping", {"n": n, "pause": 3}), [1])
    assert [future.result().status for future in first + second] == [200, 200]
    assert server.describe("stepping")["workers"][0]["restarts"] == 0


def test_describe_runs_alone_beside_a_running_batch(start, tmp_path):
    server = serve(start, tmp_path)
    long = Stream(server, "stepping", {"n": 100_000, "pause": 0.002})
    assert long.line()["step"] == 1
    described = server.manage("GET", "/models/stepping?customized=true").json[0]
    assert described["continuousBatching"] is True
    assert json.loads(json.dumps(described["customizedMetadata"]))["rows"] == 1
    again = server.manage("GET", "/models/stepping?customized=true").json[0]["customizedMetadata"]
    assert again["open"] == 1
    long.leave()


def test_workers_share_the_requests(start, tmp_path):
    server = serve(start, tmp_path, workers=2, size=1)
    futures = server.at_once(lambda n: server.predict("stepping", {"n": n, "pause": 0.02}), [20, 20])
    pids = {json.loads(future.result().body.splitlines()[0])["pid"] for future in futures}
    assert len(pids) == 2


def test_server_that_stops_lets_the_running_batch_end(start, tmp_path):
    server = serve(start, tmp_path)
    long = Stream(server, "stepping", {"n": 40, "pause": 0.02})
    assert long.line()["step"] == 1
    server.process.send_signal(signal.SIGTERM)
    assert [line["step"] for line in long.rest()] == [*range(2, 41)]
    assert server.process.wait(60) == 0


def test_hundred_clients_that_come_and_go_leave_nothing_behind(start, tmp_path):
    server = serve(start, tmp_path, size=3)
    for i in range(40):
        stream = Stream(server, "stepping", {"n": 50, "pause": 0.001})
        if i % 2:
            stream.line()
        stream.leave()
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port)) as half:
            half.sendall(b"POST /predictions/stepping HTTP/1.1\r\nContent-Length: 10\r\n\r\n{")
    server.until(lambda: server.describe("stepping")["jobQueueStatus"]["pendingRequests"] == 0)
    assert len(server.predict("stepping", {"n": 5}).body.splitlines()) == 5


def test_continuous_batching_overrules_async_communication(start, tmp_path):
    server = serve(start, tmp_path, more="asyncCommunication: true\n")
    assert len(server.predict("stepping", {"n": 3}).body.splitlines()) == 3
    assert server.logged("asyncCommunication", "continuousBatching")


def test_ranks_in_step_begin_together_what_waited(start, tmp_path):
    server = serve(start, tmp_path, more="parallelType: tp\nparallelLevel: 2\ndeviceType: cpu\n")
    first = Stream(server, "stepping", {"n": 100, "pause": 0.02})
    assert first.line()["batch"] == 1
    futures = server.at_once(lambda n: server.predict("stepping", {"n": n, "pause": 0.002}), [3, 3, 3])
    batches = [json.loads(line)["batch"] for future in futures for line in future.result().body.splitlines()]
    assert batches == [3] * 9
    assert first.line()["batch"] == 1
    first.leave()


def test_requests_join_the_running_batch_of_a_pipeline(start, tmp_path):
    server = serve(start, tmp_path, more="parallelType: pp\nparallelLevel: 2\ndeviceType: cpu\n")
    long = Stream(server, "stepping", {"n": 2000, "pause": 0.005})
    assert long.line()["batch"] == 1
    short = server.predict("stepping", {"n": 3})
    assert [json.loads(line)["batch"] for line in short.body.splitlines()] == [2, 2, 2]
    long.leave()
