"""A worker that generates, against a real socket, without a process."""

from __future__ import annotations

import json
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from flambeau.errors import HandlerError
from flambeau.wire.channel import WorkerChannel
from flambeau.wire.messages import Cancel, Failed, Load, Part, Ready, Request, Run, Samples, Stop
from flambeau.worker import execution_modes as modes
from flambeau.worker.generation import complete, generation_of
from flambeau.worker.loader import LoadedHandler
from flambeau.worker.worker import serve
from support.channels import Peer

HANDLERS = Path(__file__).parents[2] / "support" / "handlers"


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    ended: list[object] = []

    def run():
        try:
            ended.append(serve(WorkerChannel(theirs, 1 << 30)))
        except ValueError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    peer = Peer(ours)
    peer.ended, peer.thread = ended, thread
    peer.send(Load("m", "1.0", str(HANDLERS), "counting.py", 1, None, True, True, 1000))
    assert peer.receive() == [Ready(is_concurrent=True, places=3, abilities=["generate"])]
    yield peer
    with suppress(OSError):
        peer.send(Stop())
    thread.join(10)
    assert not thread.is_alive()
    ours.close()
    theirs.close()
    sys.modules.pop("counting", None)


def request(job_id, n=3, state=(), kind="predict", **order):
    body = json.dumps({"n": n, **order}).encode()
    return Request(job_id, f"r{job_id}", [("Content-Type", "application/json")], body, kind, state=[*state])


def text_of(parts, job_id):
    return b"".join(part.body for part in parts if isinstance(part, Part) and part.job_id == job_id).decode()


def test_each_step_sends_the_parts_of_all_in_one_frame(worker):
    worker.send(Run([request(1, pause=0.01)]), Run([request(2)]))
    parts = worker.receive_until(6)
    assert text_of(parts, 1) == text_of(parts, 2) == "0 1 2 "
    assert [part.last for part in parts if part.job_id == 1] == [False, False, True]
    assert parts[-1].work.handler_s > 0
    worker.send(Run([request(3, n=2), request(4, n=2)]))
    assert [part.job_id for part in worker.receive()] == [3, 4]


def test_job_joins_those_that_are_running(worker):
    worker.send(Run([request(1, n=200, pause=0.002)]))
    worker.receive()
    worker.send(Run([request(2, n=1)]))
    parts = worker.receive_until(1)
    while not any(part.job_id == 2 for part in parts):
        parts += worker.receive()
    assert sum(part.job_id == 1 for part in parts) < 150
    worker.send(Cancel([1]))


def test_cancelled_job_is_freed_at_once_and_the_others_go_on(worker):
    worker.send(Run([request(1, n=100_000)]), Run([request(2, n=100_000)]))
    worker.receive()
    worker.send(Cancel([1]))
    messages = []
    while not any(isinstance(message, Failed) for message in messages):
        messages = worker.receive()
    assert messages == [Failed([1], 499, "cancelled before it began")]
    assert {part.job_id for part in worker.receive()} == {2}
    worker.send(Cancel([2]))
    while not isinstance(worker.receive()[0], Failed):
        pass
    worker.send(Run([request(3, kind="describe")]))
    assert json.loads(worker.receive_until(1)[0].body) == {"most": 2, "open": 0, "cancelled": 2}


def test_job_that_cannot_join_is_rejected_alone(worker):
    worker.send(
        Run([request(1, n=50, pause=0.001)]), Run([Request(2, "r2", [("Content-Type", "application/json")], b"{}")])
    )
    messages = worker.receive_until(51)
    assert [message for message in messages if isinstance(message, Failed)] == [
        Failed([2], 400, "n is missing", is_bad_request=True)
    ]
    assert text_of(messages, 1).split() == [str(i) for i in range(50)]


def test_failed_step_fails_all_jobs_and_the_next_ones_are_generated(worker):
    worker.send(Run([request(1, **{"raise": 1}), request(2)]))
    failed = [message for message in worker.receive_until(3) if isinstance(message, Failed)]
    assert [(one.job_ids, one.status) for one in failed] == [([1, 2], 503)]
    assert "ValueError: as told" in failed[0].detail
    worker.send(Run([request(3)]))
    assert text_of(worker.receive_until(3), 3) == "0 1 2 "


def test_job_that_fails_by_itself_leaves_the_others_alone(worker):
    worker.send(Run([request(1, fail=1), request(2)]))
    messages = worker.receive_until(5)
    assert [message.job_ids for message in messages if isinstance(message, Failed)] == [[1]]
    assert text_of(messages, 2) == "0 1 2 "


def test_steps_that_keep_failing_end_the_worker(worker):
    worker.send(Run([request(1, **{"raise": 0})]))
    worker.receive()
    worker.send(Run([request(2, **{"raise": 0})]))
    worker.receive()
    worker.thread.join(10)
    assert [str(error) for error in worker.ended] == ["as told"]


def test_stop_lets_running_jobs_finish(worker):
    worker.send(Run([request(1, n=20, pause=0.001)]), Stop())
    assert text_of(worker.receive_until(20), 1).split() == [str(i) for i in range(20)]
    worker.thread.join(10)
    assert worker.ended == [0]


def test_job_with_state_is_resumed(worker):
    worker.send(Run([request(1, n=5, resume=True, state=[b"1", b"3"])]))
    parts = worker.receive_until(2)
    assert text_of(parts, 1) == "3 4 "
    assert [part.state for part in parts] == [b"4", b"5"]


def test_heartbeat_is_sent_while_a_reply_in_one_piece_is_made(worker, monkeypatch):
    monkeypatch.setattr(modes, "HEARTBEAT_S", 0.0)
    worker.send(Run([request(1, n=3, whole=True)]))
    assert worker.receive() == [Samples([])]
    assert text_of(worker.receive_until(1), 1) == "0 1 2 "


def test_part_larger_than_the_server_accepts_fails_its_job(worker):
    worker.send(Run([request(1, n=400, whole=True), request(2, n=2)]))
    failed = worker.receive_until(3)[-1]
    assert (failed.job_ids, failed.status) == ([1], 503)
    assert "max_response_size is 1000" in failed.message


def test_parts_that_are_large_together_are_sent_apart(worker):
    worker.send(Run([request(1, n=200, whole=True), request(2, n=200, whole=True)]))
    assert [len(worker.receive()) for _ in range(2)] == [1, 1]


class Smallest:
    places = 1
    has_work = False

    def join(self, request, row): ...

    def step(self): ...

    def cancel(self, job_id): ...


def test_optional_members_are_added_to_a_handlers_own_generation():
    generation = complete(Smallest())
    assert (generation.abilities, generation.max_length, generation.on_results) == ((), 0, None)
    generation.close()
    with pytest.raises(HandlerError, match="one rank only"):
        generation.follow()


def test_generation_without_a_required_member_is_rejected_by_name():
    with pytest.raises(HandlerError, match="object without places, has_work, join, step, cancel"):
        complete(object())


@pytest.mark.parametrize(("handler", "envelope"), [(None, ""), (Smallest(), ""), (Mock(), "json")])
def test_handler_without_generation_or_in_an_envelope_has_none(handler, envelope):
    assert generation_of(LoadedHandler(print, False, handler, envelope=envelope)) is None
