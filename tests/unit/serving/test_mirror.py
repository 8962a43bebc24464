"""Copies of requests for another version, and how its answers differ."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from flambeau.errors import JobFailed, QueueFull, WorkerDied
from flambeau.serving.job import LOW, RequestBody
from flambeau.serving.mirror import KEPT, MAX_BYTES, SMALL_BYTES, Answer, Mirror, compare
from flambeau.wire.generation import Piece, encode_pieces
from flambeau.wire.messages import Part
from support.jobs import Listener, new_job


def answer(*bodies: bytes, status: int = 200, error: str = "") -> Answer:
    made = Answer()
    made.status, made.bodies, made.error = status, [*bodies], error
    return made


def difference(own: Answer, other: Answer, kind: str = "predict") -> str:
    return compare(SimpleNamespace(own=own, other=other, kind=kind))


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (b"same", b"same", ""),
        (b"[0.5, 1e-9, NaN]", b"[0.5004, 0, NaN]", ""),
        (b'{"a": 1, "b": 2.0}', b'{"b": 2, "a": 1}', ""),
        (b'{"id": "1", "model_version": "1.0"}', b'{"id": "1", "model_version": "2.0"}', ""),
        (b"[0.5]", b"[0.51]", "0: 0.5, not 0.51"),
        (b"[1000]", b"[1001]", "0: 1000, not 1001"),  # numbers of classes
        (b"[1]", b"[true]", "0: 1, not True"),
        (b"[10000000000000000000000000]", b"[1e400]", "0: 10000000000000000000000000, not inf"),
        (b'{"a": [{"b": "x"}]}', b'{"a": [{"b": "y"}]}', "a.0.b: 'x', not 'y'"),
        (b"[1]", b"[1, 2]", "the answer: [1], not [1, 2]"),
        (b'{"a": {"model_version": 1}}', b'{"a": {"model_version": 2}}', "a.model_version: 1, not 2"),
        (b"some text", b"some Text", "byte 5: b'text', not b'Text'"),
        (b"abc", b"abcd", "byte 3: b'', not b'd'"),
        (b"[1%b]" % (b"0" * 400), b"[1.0]", f"byte 2: b'{'0' * 78}…, not b'.0]'"),
        (b"[" * 100_000, b"[" * 99_999, "byte 99999: b'[', not b''"),
    ],
)
def test_bodies_are_compared_as_json_and_else_as_bytes(own, other, expected):
    assert difference(answer(own), answer(other)) == expected


def test_streams_are_compared_by_their_whole_text():
    assert difference(answer(b"a", b"bc", b""), answer(b"ab", b"c")) == ""
    own = [encode_pieces([Piece(0, "to")]), b"", encode_pieces([Piece(0, "gether", finish_reason="stop")])]
    same = [encode_pieces([Piece(0, "together", finish_reason="stop", num_tokens=2)])]
    assert difference(answer(*own), answer(*same), "generate") == ""
    other = [encode_pieces([Piece(0, "together", finish_reason="length")])]
    expected = "0: 'together [stop]', not 'together [length]'"
    assert difference(answer(*own), answer(*other), "generate") == expected


def test_statuses_and_errors_are_compared():
    assert difference(answer(b"x"), answer(b"x", status=404)) == "status 200, not 404"
    assert difference(answer(error="JobFailed: a"), answer(error="JobFailed: b")) == ""
    assert difference(answer(b"x"), answer(error="WorkerDied: it died")) == "status 200, not WorkerDied: it died"


class Copies(list):
    """Takes the copies."""

    def __init__(self, error: Exception | None = None, *, room: bool = True) -> None:
        self.error, self.mirror = error, Mirror(self.take, lambda: room)
        self.mirror.percent = 100

    def take(self, job):
        if self.error is not None:
            raise self.error
        self.append(job)

    def one(self, job):
        self.mirror.copy(job)
        return self.pop()


def parts(body: bytes, status: int = 200) -> list[Part]:
    return [Part(1, body, True, status)]


async def settled(mirror: Mirror) -> dict[str, int]:
    await asyncio.sleep(0)
    while mirror._num_comparing:
        await asyncio.sleep(0.001)
    return {name: count for name, count in mirror.counts.items() if count}


async def test_a_copy_has_all_of_the_request_and_its_answer_goes_to_nobody():
    copies, listener, given_back = Copies(), Listener(), []
    body = RequestBody.shared(SimpleNamespace(capacity=3), 3, given_back.append)
    job = new_job(listener, headers=[("traceparent", "00-1"), ("x-y", "z")], body=body)
    job.tenant = SimpleNamespace(release=lambda *_, **__: None)
    copy = copies.one(job)
    assert (copy.headers, copy.body, copy.request_id) == ([("x-y", "z")], body, job.request_id)
    assert (copy.tenant, copy.priority, copy.is_copy, job.is_copy) == (None, LOW, True, False)
    job.deliver(parts(b"[1.0]"))
    assert [part.body for part in listener.parts] == [b"[1.0]"]
    assert not given_back  # the copy still reads the body
    copy.deliver(parts(b"[1.0001]"))
    assert (len(given_back), len(listener.parts)) == (1, 1)
    assert await settled(copies.mirror) == {"mirrored": 1, "equal": 1}


async def test_differences_and_failures_are_counted_and_the_last_are_kept():
    copies = Copies()
    for number in range(KEPT + 2):
        job = new_job()
        copy = copies.one(job)
        copy.fail(WorkerDied(cause="")) if number == KEPT + 1 else copy.deliver(parts(b"%d" % number))
        job.deliver(parts(b"x"))
    assert await settled(copies.mirror) == {"mirrored": KEPT + 2, "different": KEPT + 1, "failed": 1}
    kept = [one["difference"] for one in copies.mirror.differences]
    assert (len(kept), kept[0]) == (KEPT, "byte 0: b'x', not b'2'")
    job = new_job()
    copy = copies.one(job)
    for one in (job, copy):
        one.fail(JobFailed("no", status=400))
    assert (await settled(copies.mirror))["equal"] == 1


async def test_larger_answers_are_compared_in_a_thread_and_huge_ones_not():
    copies = Copies()
    for size in (SMALL_BYTES + 1, MAX_BYTES + 1):
        job, listener = new_job(), Listener()
        job.receiver = listener
        copy = copies.one(job)
        copy.deliver([Part(1, b"x" * size, False)])
        assert copy.is_over is (size > MAX_BYTES)  # it is cancelled
        copy.deliver(parts(b""))
        job.deliver(parts(b"x" * size))
        assert len(listener.parts[0].body) == size
    assert await settled(copies.mirror) == {"mirrored": 2, "equal": 1, "dropped": 1}


async def test_copies_that_find_no_room_are_dropped_without_a_trace():
    for copies in (Copies(room=False), Copies(QueueFull("full", retry_after_s=1)), Copies(ValueError("a mistake"))):
        job = new_job(listener := Listener(), body=RequestBody(b"x"))
        copies.mirror.copy(job)
        assert job.receiver is listener
        assert (copies.mirror.counts["mirrored"], copies.mirror.counts["dropped"]) == (0, 1)
        assert job.body._readers == 1


async def test_a_mirror_that_is_closed_cancels_its_copies():
    copies = Copies()
    job = new_job()
    copy = copies.one(job)
    copies.mirror.close()
    assert (copy.is_over, job.is_over) == (True, False)
    copies.mirror.copy(new_job())
    job.deliver(parts(b"x"))
    assert await settled(copies.mirror) == {"mirrored": 1}


async def test_only_requests_for_answers_are_copied():
    copies = Copies()
    for kind in ("describe", "tokenize", "adapter"):
        copies.mirror.copy(new_job(kind=kind))
    over = new_job()
    over.deliver(parts(b""))
    copies.mirror.copy(over)
    assert not copies
