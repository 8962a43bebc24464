"""Continuous batching against a real socket, without a process."""

from __future__ import annotations

import socket
import sys
import threading

import pytest

from flambeau.wire.channel import WorkerChannel, to_frame
from flambeau.wire.messages import Cancel, Failed, Load, Part, Ready, Request, Run, Stop
from flambeau.worker.worker import serve
from support.channels import Peer

STEPS = """
left = {}

def handle(data, context):
    if data is None:
        return None
    rows = []
    for name, row in zip(context.request_ids.values(), data):
        if name not in left:
            left[name] = row["body"]
        rows.append([name, row, "body" in context.get_all_request_header(len(rows))])
    def is_final(name):
        def criterion(result):
            left[name] -= 1
            return left.pop(name) == 0 if left[name] == 0 else False
        return criterion
    context.stopping_criteria = [is_final(name) for name in context.request_ids.values()]
    if any(left[name] == 13 for name in context.request_ids.values()):
        left.clear()
        raise ValueError("thirteen")
    return [f"{row}" for row in rows]
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    ours, theirs = socket.socketpair()
    ours.settimeout(10)

    def start(source):
        (tmp_path / "steps.py").write_text(source)
        start.thread = threading.Thread(target=serve, args=(WorkerChannel(theirs, 1 << 30),))
        start.thread.start()
        peer = Peer(ours)
        load = Load("m", "1.0", str(tmp_path), "steps.py", 4, None, True, True, 1000, schedule="continuous")
        peer.send(load)
        assert peer.receive() == [Ready(is_concurrent=True, is_continuous=True)]
        return peer

    yield start
    Peer(ours).send(Stop())
    start.thread.join(10)
    assert not start.thread.is_alive()
    ours.close()
    theirs.close()
    sys.modules.pop("steps", None)


def request(job_id, count):
    return Request(job_id, f"r{job_id}", [("Content-Type", "application/json")], str(count).encode())


def test_later_calls_bring_ids_and_headers_but_an_empty_row(worker):
    peer = worker(STEPS)
    peer.send(Run([request(1, 3)]))
    parts = peer.receive_until(3)
    assert [part.last for part in parts] == [False, False, True]
    assert parts[0].body == b"['r1', {'body': 3}, True]"
    assert parts[1].body == parts[2].body == b"['r1', {}, False]"


def test_requests_that_arrive_together_share_their_steps(worker):
    peer = worker(STEPS)
    peer.send(Run([request(1, 1), request(2, 2)]))
    assert [(part.job_id, part.last) for part in peer.receive()] == [(1, True), (2, False)]
    assert [(part.job_id, part.last) for part in peer.receive_until(1)] == [(2, True)]


def test_cancelled_request_leaves_the_batch_and_others_go_on(worker):
    peer = worker(STEPS)
    peer.send(Run([request(1, 1_000_000)]))
    assert peer.receive_until(1)[0].last is False
    peer.send(Cancel([1]), Run([request(2, 2)]))
    answers = []
    while not (answers and isinstance(answers[-1], Part) and answers[-1].last):
        answers += peer.receive_until(1)
    assert [answer.job_ids for answer in answers if isinstance(answer, Failed)] == [[1]]
    assert answers[-1].job_id == 2


def test_request_cancelled_before_its_first_step_never_has_one(worker):
    peer = worker(STEPS)
    peer.sock.sendall(b"".join(to_frame([message]) for message in [Run([request(1, 5)]), Cancel([1]), Cancel([77])]))
    assert [answer.job_ids for answer in peer.receive()] == [[1]]
    peer.send(Run([request(2, 1)]))
    assert [part.job_id for part in peer.receive_until(1)] == [2]


def test_exception_fails_every_request_of_the_batch_once(worker):
    peer = worker(STEPS)
    peer.send(Run([request(1, 50), request(2, 14)]))
    first = peer.receive_until(2)
    assert [part.last for part in first] == [False, False]
    [failed] = peer.receive_until(1)
    assert (failed.job_ids, failed.status, failed.message) == ([1, 2], 503, "Prediction failed")
    peer.send(Run([request(3, 1)]))
    assert [part.job_id for part in peer.receive_until(1)] == [3]


def test_stop_lets_the_batch_end(worker):
    peer = worker(STEPS)
    peer.send(Run([request(1, 12)]), Stop())
    assert [part.last for part in peer.receive_until(12)] == [False] * 11 + [True]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def handle(data, c): return data and 7\n", "Invalid model predict output"),
        ("def handle(data, c): return data and [1, 2]\n", "number of batch response mismatched"),
        ("def handle(data, c): return data and [object()]\n", "Unsupported model output data type."),
        (
            "def handle(data, c):\n    c.stopping_criteria = [lambda result: 1 / 0]\n    return data and [1]\n",
            "Prediction failed",
        ),
    ],
)
def test_invalid_results_fail_with_the_known_messages(worker, source, message):
    peer = worker(source)
    peer.send(Run([request(1, 1)]))
    [failed] = peer.receive_until(1)
    assert (failed.status, failed.message) == (503, message)


def test_generators_are_run_to_their_end(worker):
    peer = worker("def handle(data, c):\n    yield ['a']\n    yield ['b']\n")
    peer.send(Run([request(1, 1)]))
    assert [(part.body, part.last) for part in peer.receive_until(3)] == [(b"a", False), (b"b", False), (b"", True)]


def test_async_generators_are_run_to_their_end(worker):
    peer = worker("async def handle(data, c):\n    yield ['a']\n    yield ['b']\n")
    peer.send(Run([request(1, 1)]))
    assert [(part.body, part.last) for part in peer.receive_until(3)] == [(b"a", False), (b"b", False), (b"", True)]
