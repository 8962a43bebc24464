"""Sessions: limits, order, and when one ends; decisions without effects."""

from __future__ import annotations

import pytest

from flambeau.config.server import SequenceHeaders
from flambeau.serving.job import Job, RequestBody
from flambeau.serving.scheduling.sessions import (
    SessionLimits,
    Sessions,
    ends_at,
    ids_in,
    sessions_per_worker,
    value_of,
    with_session,
)
from flambeau.wire.messages import Part

NAMES = SequenceHeaders()
LIMITS = SessionLimits(count=2, queue_size=2, idle_s=5.0, total_s=60.0)


class Listener:
    def __init__(self):
        self.errors = []

    def on_parts(self, parts):
        pass

    def on_error(self, error):
        self.errors.append(error)


def new_job(session=None, kind="predict"):
    headers = [(NAMES.id, session)] if session else []
    return Job(Listener(), request_id="r", headers=headers, body=RequestBody(b""), arrived=0.0, kind=kind)


def new_sessions(limits=LIMITS):
    return Sessions(limits, NAMES, 10)


def test_each_worker_takes_its_share_of_the_sessions():
    assert sessions_per_worker(4, 2) == 2
    assert sessions_per_worker(5, 2) == 2
    assert sessions_per_worker(1, 4) == 1
    assert sessions_per_worker(3, 0) == 3


@pytest.mark.parametrize(
    ("last_active", "is_busy", "total_s", "moment"),
    [
        (10.0, False, None, 15.0),
        (10.0, True, None, None),
        (10.0, True, 60.0, 61.0),
        (10.0, False, 60.0, 15.0),
        (58.0, False, 60.0, 61.0),
    ],
)
def test_session_ends_by_idleness_or_age_whichever_comes_first(last_active, is_busy, total_s, moment):
    limits = SessionLimits(idle_s=5.0, total_s=total_s)
    assert ends_at(started=1.0, last_active=last_active, is_busy=is_busy, limits=limits) == moment


def test_end_header_may_name_several_sessions():
    assert ids_in("a") == ["a"]
    assert ids_in(" a ;b;; c ") == ["a", "b", "c"]
    assert ids_in(" ; ") == []


def test_request_without_an_id_opens_a_session_and_gets_its_headers():
    known, headers = with_session([("TS_Request_Sequence_ID", "mine")], NAMES)
    assert (known, headers) == ("mine", [("TS_Request_Sequence_ID", "mine")])
    new, headers = with_session([("accept", "*/*"), (NAMES.id, " "), (NAMES.start, "false")], NAMES)
    assert new.startswith("ts-seq-")
    assert headers == [("accept", "*/*"), (NAMES.id, new), (NAMES.start, "true")]
    assert with_session([], NAMES)[0] != new


def test_header_names_are_the_servers():
    names = SequenceHeaders(id="X-Session", start="X-Start", end="X-End")
    assert with_session([("x-session", "s")], names)[0] == "s"
    assert value_of([("x-end", "a")], names.end) == "a"
    assert with_session([(NAMES.id, "s")], names)[0] != "s"


def test_limits_count_live_sessions_and_what_waits_in_each():
    sessions = new_sessions()
    for id in ("a", "a", "b"):
        assert sessions.rejection(new_job(id).headers) == ""
        sessions.put_in_session(new_job(id), 0.0)
    assert "maxSequenceJobQueueSize" in sessions.rejection(new_job("a").headers)
    assert sessions.rejection(new_job("b").headers) == ""
    assert "maxNumSequence" in sessions.rejection(new_job("c").headers)
    assert "maxNumSequence" in sessions.rejection([])
    sessions.end(sessions.find(new_job("b").headers))
    assert sessions.rejection([]) == ""


def test_jobs_of_a_session_leave_one_at_a_time_in_order():
    sessions = new_sessions()
    first, second = new_job("a"), new_job("a")
    session = sessions.put_in_session(first, 0.0)
    assert sessions.put_in_session(second, 0.0) is session
    assert session.may_send
    assert session.take() is first
    assert not session.may_send
    first.deliver([Part(first.id, b"", last=False)])  # a stream that goes on lets the next one join
    assert session.may_send
    assert session.take() is second
    assert not session.may_send
    second.cancel()
    assert not session.waiting
    assert session.is_busy
    first.deliver([Part(first.id, b"")])
    assert not session.is_busy


def test_cancelled_job_leaves_its_session():
    sessions = new_sessions()
    job = new_job("a")
    sessions.put_in_session(job, 0.0)
    assert len(sessions) == 1
    job.cancel()
    assert len(sessions) == 0


def test_session_expires_when_it_has_been_idle_for_too_long():
    sessions = new_sessions()
    job = new_job("a")
    session = sessions.put_in_session(job, 10.0)
    assert sessions.expired(20.0) == []
    session.take()
    assert sessions.expired(20.0) == []
    job.deliver([Part(job.id, b"")])
    sessions.on_reply(session, [], 30.0)
    assert sessions.expired(34.9) == []
    assert sessions.expired(35.0) == [session]
    assert sessions.end(session) == []
    assert sessions.expired(35.0) == []


def test_reply_ends_the_sessions_it_names_and_unknown_ones_are_ignored():
    sessions = new_sessions()
    a, b = (sessions.put_in_session(new_job(id), 0.0) for id in "ab")
    parts = [Part(1, b"", False), Part(1, b"", True, headers=[("TS_REQUEST_SEQUENCE_END", "b; nobody ;a")])]
    assert sessions.on_reply(a, parts, 7.0) == [b, a]
    assert a.last_active == 7.0


def test_ending_a_session_again_does_not_touch_its_successor():
    sessions = new_sessions()
    old = sessions.put_in_session(new_job("a"), 0.0)
    assert len(sessions.end(old)) == 1
    new = sessions.put_in_session(new_job("a"), 1.0)
    assert new is not old
    assert sessions.end(old) == []
    assert sessions.all() == [new]


def test_taking_all_ends_every_session():
    sessions = new_sessions()
    lone = new_job(kind="describe")
    sessions.put(lone)
    job = new_job("a")
    sessions.put_in_session(job, 0.0)
    assert len(sessions) == 2
    assert sessions.num_lone == 1
    assert sessions.take_all() == [lone, job]
    assert sessions.all() == []


def test_session_past_its_time_answers_the_jobs_that_wait_first():
    sessions = new_sessions()
    session = sessions.put_in_session(new_job("a"), 0.0)
    assert sessions.expired(61.0) == []
    session.take()
    assert sessions.expired(61.0) == [session]
