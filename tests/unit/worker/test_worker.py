"""A worker against a real socket, without a process."""

from __future__ import annotations

import gc
import socket
import sys
import threading

import pytest

from flambeau.wire.channel import WorkerChannel, to_frame
from flambeau.wire.messages import Cancel, Failed, Load, Part, Ready, Request, Run, Stop
from flambeau.worker.worker import OBJECTS_PER_COLLECTION, rare_collections, serve
from support.channels import Peer


@pytest.fixture
def worker(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    threads = []
    ends: list[socket.socket] = []

    def start(source: str) -> Peer:
        (tmp_path / "mine.py").write_text(source)
        ours, theirs = socket.socketpair()
        ours.settimeout(10)
        ends.extend([ours, theirs])
        thread = threading.Thread(target=serve, args=(WorkerChannel(theirs, 1 << 30),))
        thread.start()
        threads.append(thread)
        peer = Peer(ours)
        peer.send(Load("m", "1.0", str(tmp_path), "mine.py", 4, None, True, True, 1000))
        return peer

    yield start
    for end in ends[::2]:
        Peer(end).send(Stop())
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    for end in ends:
        end.close()


def request(job_id, body=b"{}"):
    return Request(job_id, f"r{job_id}", [("Content-Type", "application/json")], body)


ECHO = "def handle(data, c): return data and [row['body'] for row in data]\n"
ASYNC = """
import asyncio

async def handle(data, c):
    await asyncio.sleep(0.01)
    return [row["body"] for row in data or []]
"""


def test_batch_is_answered_in_one_frame(worker):
    peer = worker(ECHO)
    assert peer.receive() == [Ready()]
    peer.send(Run([request(1, b"1"), request(2, b"2")]))
    first, second = peer.receive()
    assert first == Part(1, b"1", work=first.work)  # the first part has the times of the batch
    assert second == Part(2, b"2")
    assert first.work.handler_s > 0


def test_cancelled_job_is_skipped_if_it_has_not_begun(worker):
    peer = worker(ECHO)
    peer.receive()
    peer.send(Run([request(1)]), Run([request(2)]), Cancel([2]), Run([request(3)]))
    answers = peer.receive_until(3)
    assert [type(answer) for answer in answers] == [Part, Failed, Part]
    assert answers[1].job_ids == [2]


def test_bad_body_fails_alone(worker):
    peer = worker(ECHO)
    peer.receive()
    bad = Request(2, "r2", [("content-type", "multipart/form-data")], b"x")
    peer.send(Run([request(1, b"1"), bad, request(3, b"3")]))
    answers = peer.receive_until(3)
    assert sorted(a.job_id for a in answers if isinstance(a, Part)) == [1, 3]
    assert next(a for a in answers if isinstance(a, Failed)).status == 400


def test_async_batches_that_arrive_together_are_all_run(worker):
    peer = worker(ASYNC)
    assert peer.receive() == [Ready(is_concurrent=True)]
    peer.send(*(Run([request(i)]) for i in range(1, 100)))
    assert sorted(part.job_id for part in peer.receive_until(99)) == list(range(1, 100))


def test_async_job_cancelled_at_once_never_begins(worker):
    peer = worker(ASYNC)
    peer.receive()
    frames = [Run([request(1)]), Run([request(2)]), Cancel([2]), Run([request(3)])]
    peer.sock.sendall(b"".join(to_frame([message]) for message in frames))
    answers = peer.receive_until(3)
    failed = [answer for answer in answers if isinstance(answer, Failed)]
    assert [answer.job_ids for answer in failed] == [[2]]


def test_handler_whose_own_task_was_cancelled_is_answered(worker):
    source = "import asyncio\nasync def handle(data, c):\n    if data:\n        raise asyncio.CancelledError\n"
    peer = worker(source)
    peer.receive()
    peer.send(Run([request(1)]))
    [failed] = peer.receive()
    assert (failed.job_ids, failed.status) == ([1], 503)


def test_worker_reports_why_a_model_cannot_be_loaded(worker):
    peer = worker("raise RuntimeError('no luck')\n")
    [failed] = peer.receive()
    assert failed.job_ids == []
    assert failed.message == "RuntimeError: no luck (mine.py:1)"
    assert "Traceback" in failed.detail


def test_handlers_metrics_travel_to_the_server(worker):
    peer = worker("def handle(data, c):\n    c.metrics.add_counter('seen', 2)\n    return data and ['x']\n")
    peer.receive()
    peer.send(Run([request(1)]))
    samples, part = peer.receive()  # in this order: a client with a reply finds its request counted
    assert part.body == b"x"
    assert samples.samples == [
        ("seen", "counter", "Count", 2.0, [("ModelName", "m"), ("Level", "Model")], request(1).request_id)
    ]


def test_cycles_are_looked_for_rarely_only_while_a_model_is_loaded():
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold()[0] == OBJECTS_PER_COLLECTION
    assert gc.get_threshold() == before


def test_what_a_handler_sets_for_the_collector_stays():
    before = gc.get_threshold()
    try:
        with rare_collections():
            gc.set_threshold(5_000, 20, 30)
        assert gc.get_threshold() == (5_000, 20, 30)
    finally:
        gc.set_threshold(*before)
