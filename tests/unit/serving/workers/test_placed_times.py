"""Times of a worker on another machine, whose clock is another."""

from __future__ import annotations

from flambeau.serving.workers.remote_worker import in_own_time
from flambeau.wire.messages import Work


def test_work_of_another_machine_ends_when_its_reply_arrives():
    work = Work(began=5.0, ended=7.5, read_s=0.1, handler_s=2.0, pauses=[("collecting garbage", 6.0, 0.2)])
    shown = in_own_time(work, 1000.0)
    assert (shown.began, shown.ended, shown.handler_s) == (997.5, 1000.0, 2.0)
    assert shown.pauses == [("collecting garbage", 998.5, 0.2)]


def test_work_without_pauses_has_none():
    assert in_own_time(Work(began=5.0, ended=7.5, read_s=0.1, handler_s=2.0), 10.0).pauses is None
