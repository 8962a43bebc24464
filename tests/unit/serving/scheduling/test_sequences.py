"""Sequences: limits, order, and when one ends; decisions without effects."""

from __future__ import annotations

import pytest

from flambeau.config.model import ModelConfig
from flambeau.config.server import SequenceHeaders
from flambeau.serving.job import Body, Job
from flambeau.serving.scheduling.choice import contradictions
from flambeau.serving.scheduling.sequences import (
    SequenceLimits,
    Sequences,
    ends_at,
    ids_in,
    per_worker,
    value_of,
    with_sequence,
)
from flambeau.serving.workers.worker_process import environment_for
from flambeau.wire.messages import Load, Part

NAMES = SequenceHeaders()
LIMITS = SequenceLimits(count=2, queue_size=2, idle_s=5.0, total_s=60.0)


class Listener:
    def __init__(self):
        self.errors = []

    def on_parts(self, parts):
        pass

    def on_error(self, error):
        self.errors.append(error)


def new_job(sequence=None, kind="predict"):
    headers = [(NAMES.id, sequence)] if sequence else []
    return Job(Listener(), request_id="r", headers=headers, body=Body(b""), arrived=0.0, kind=kind)


def new_sequences(limits=LIMITS):
    return Sequences(limits, NAMES, 10)


def test_each_worker_takes_its_share_of_the_sequences():
    assert per_worker(4, 2) == 2
    assert per_worker(5, 2) == 2
    assert per_worker(1, 4) == 1
    assert per_worker(3, 0) == 3


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
def test_sequence_ends_by_idleness_or_age_whichever_comes_first(last_active, is_busy, total_s, moment):
    limits = SequenceLimits(idle_s=5.0, total_s=total_s)
    assert ends_at(started=1.0, last_active=last_active, is_busy=is_busy, limits=limits) == moment


def test_end_header_may_name_several_sequences():
    assert ids_in("a") == ["a"]
    assert ids_in(" a ;b;; c ") == ["a", "b", "c"]
    assert ids_in(" ; ") == []


def test_request_without_an_id_opens_a_sequence_and_its_handler_is_told():
    known, headers = with_sequence([("TS_Request_Sequence_ID", "mine")], NAMES)
    assert (known, headers) == ("mine", [("TS_Request_Sequence_ID", "mine")])
    new, headers = with_sequence([("accept", "*/*"), (NAMES.id, " "), (NAMES.start, "false")], NAMES)
    assert new.startswith("ts-seq-")
    assert headers == [("accept", "*/*"), (NAMES.id, new), (NAMES.start, "true")]
    assert with_sequence([], NAMES)[0] != new


def test_header_names_are_the_servers():
    names = SequenceHeaders(id="X-Session", start="X-Start", end="X-End")
    assert with_sequence([("x-session", "s")], names)[0] == "s"
    assert value_of([("x-end", "a")], names.end) == "a"
    assert with_sequence([(NAMES.id, "s")], names)[0] != "s"


def test_limits_count_live_sequences_and_what_waits_in_each():
    sequences = new_sequences()
    for id in ("a", "a", "b"):
        assert sequences.refusal(new_job(id).headers) == ""
        sequences.put_in_sequence(new_job(id), 0.0)
    assert "maxSequenceJobQueueSize" in sequences.refusal(new_job("a").headers)
    assert sequences.refusal(new_job("b").headers) == ""
    assert "maxNumSequence" in sequences.refusal(new_job("c").headers)
    assert "maxNumSequence" in sequences.refusal([])
    sequences.end(sequences.find(new_job("b").headers))
    assert sequences.refusal([]) == ""


def test_jobs_of_a_sequence_leave_one_at_a_time_in_order():
    sequences = new_sequences()
    first, second = new_job("a"), new_job("a")
    sequence = sequences.put_in_sequence(first, 0.0)
    assert sequences.put_in_sequence(second, 0.0) is sequence
    assert sequence.may_send
    assert sequence.take() is first
    assert not sequence.may_send
    first.deliver([Part(first.id, b"", last=False)])  # a stream that goes on lets the next one join
    assert sequence.may_send
    assert sequence.take() is second
    assert not sequence.may_send
    second.cancel()
    assert not sequence.waiting
    assert sequence.is_busy
    first.deliver([Part(first.id, b"")])
    assert not sequence.is_busy


def test_cancelled_job_leaves_its_sequence():
    sequences = new_sequences()
    job = new_job("a")
    sequences.put_in_sequence(job, 0.0)
    assert len(sequences) == 1
    job.cancel()
    assert len(sequences) == 0


def test_sequence_is_overdue_when_it_has_been_idle_for_too_long():
    sequences = new_sequences()
    job = new_job("a")
    sequence = sequences.put_in_sequence(job, 10.0)
    assert sequences.overdue(20.0) == []
    sequence.take()
    assert sequences.overdue(20.0) == []
    job.deliver([Part(job.id, b"")])
    sequences.on_reply(sequence, [], 30.0)
    assert sequences.overdue(34.9) == []
    assert sequences.overdue(35.0) == [sequence]
    assert sequences.end(sequence) == []
    assert sequences.overdue(35.0) == []


def test_reply_ends_the_sequences_it_names_and_unknown_ones_are_ignored():
    sequences = new_sequences()
    a, b = (sequences.put_in_sequence(new_job(id), 0.0) for id in "ab")
    parts = [Part(1, b"", False), Part(1, b"", True, headers=[("TS_REQUEST_SEQUENCE_END", "b; nobody ;a")])]
    assert sequences.on_reply(a, parts, 7.0) == [b, a]
    assert a.last_active == 7.0


def test_ending_a_sequence_again_does_not_touch_its_successor():
    sequences = new_sequences()
    old = sequences.put_in_sequence(new_job("a"), 0.0)
    assert len(sequences.end(old)) == 1
    new = sequences.put_in_sequence(new_job("a"), 1.0)
    assert new is not old
    assert sequences.end(old) == []
    assert sequences.live() == [new]


def test_taking_all_ends_every_sequence():
    sequences = new_sequences()
    lone = new_job(kind="describe")
    sequences.put(lone)
    job = new_job("a")
    sequences.put_in_sequence(job, 0.0)
    assert len(sequences) == 2
    assert sequences.num_lone == 1
    assert sequences.take_all() == [lone, job]
    assert sequences.live() == []


@pytest.mark.parametrize(
    ("options", "schedule", "num_together", "words"),
    [
        ({"batchSize": 4}, "batches", 4, []),
        ({"batchSize": 4, "asyncCommunication": True}, "async", 1, ["batchSize 4"]),
        ({"asyncCommunication": True}, "async", 1, []),
        ({"batchSize": 4, "continuousBatching": True}, "continuous", 4, []),
        ({"continuousBatching": True, "asyncCommunication": True}, "continuous", 1, ["continuousBatching"]),
        ({"batchSize": 4, "sequenceBatching": True}, "sequences", 4, ["sequenceMaxIdleMSec"]),
        (
            {"sequenceBatching": True, "sequenceMaxIdleMSec": 5, "asyncCommunication": True},
            "sequences",
            1,
            ["sequenceBa"],
        ),
        (
            {"batchSize": 4, "sequenceBatching": True, "sequenceMaxIdleMSec": 5, "continuousBatching": True},
            "continuous",
            8,
            [],
        ),
    ],
)
def test_one_way_of_scheduling_wins_and_the_others_are_named(options, schedule, num_together, words):
    config = ModelConfig().with_options(options)
    assert (config.schedule, config.num_together) == (schedule, num_together)
    warnings = [*contradictions(config)]
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))


def test_workers_are_told_the_header_names_of_the_server():
    load = Load("m", "1.0", "/model", "h.py", 1, None, True, True, 1000)
    names = SequenceHeaders(id="X-Session", start="X-Start", end="X-End")
    environment = environment_for(load, threads=1, hidden="", sequence_headers=names)
    found = [environment[f"TS_REQUEST_SEQUENCE_{name}"] for name in ("ID", "START", "END")]
    assert found == ["X-Session", "X-Start", "X-End"]
