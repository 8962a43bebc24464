"""The Server-Timing header by the short and by the long way."""

from __future__ import annotations

import pytest

from flambeau.frontend.timing_header import any_timing_line, server_timing, timing_line
from flambeau.serving.job_times import JobTimes
from flambeau.wire.messages import Work

ORDINARY = [
    Work(10.6, 11.9, 0.1, 1.1, (0.2, 0.5, 0.3)),
    Work(10.6, 11.9, 0.1, 1.1),
    Work(10.6, 11.9, 0.1, 1.1, (1.0, 1.0, 1.0)),
]


def parts_of(line):
    assert line.startswith(b"server-timing: ")
    assert line.endswith(b"\r\n")
    pairs = [part.partition(";dur=") for part in line.decode()[15:-2].split(", ")]
    return {name: float(value) for name, _, value in pairs}


@pytest.mark.parametrize("work", ORDINARY)
@pytest.mark.parametrize("started", [10.5, 10.7], ids=["sent to an idle worker", "sent ahead"])
def test_both_ways_give_the_same(work, started):
    times = JobTimes(10.0, 10.5, started, 12.0, "w", 1, work)
    assert parts_of(timing_line(times)) == pytest.approx(parts_of(any_timing_line(times)), abs=0.01)


def test_parts_that_are_rare_are_named():
    times = JobTimes(10.0, 10.5, 10.5, 12.0, "w", 2, ORDINARY[1], held_since=10.3, retried=10.1)
    text = server_timing(times)
    assert text == (
        "lost;dur=100.000, queue;dur=200.000, batch_wait;dur=200.000, transfer;dur=400.000, handler;dur=1100.000, "
        "total;dur=2000.000"
    )


def test_worker_with_another_clock_gets_a_header_too():
    times = JobTimes(10.0, 10.5, 10.5, 12.0, "w", 1, Work(1.0, 5.0, 0.0, 4.0))
    assert parts_of(timing_line(times)) == {"queue": 500.0, "handler": 1500.0, "total": 2000.0}
