"""The slowest requests are kept, and explained."""

from __future__ import annotations

from flambeau.serving.job_times import JobTimes
from flambeau.serving.slow_requests import SlowRequests, explain, slowest_of
from flambeau.wire.messages import GenerationWork, Work


def explanation(name="r", **options):
    times = options.pop("times", JobTimes(10.0, 10.5, 10.5, 12.0, "w", 1))
    given = {"request_id": name, "model": "m", "version": "1.0", "status": 200, "now": 12.0, "wall_time": 0.0}
    return explain(times, **{**given, **options})


def names(slow, limit=50, now=0.0):
    return [found.request_id for found in slowest_of([slow], limit, now)]


def test_only_the_slowest_of_an_interval_are_kept():
    slow = SlowRequests(kept=3)
    for seconds in (1, 5, 2, 4, 3):
        slow.add(seconds, explanation(str(seconds)), now=0.0)
    assert names(slow) == ["5", "4", "3"]
    assert slow.least_s == 3
    assert names(slow, limit=1) == ["5"]


def test_next_interval_takes_faster_requests_again_and_an_old_one_is_forgotten():
    slow = SlowRequests(kept=1, interval_s=10.0, num_intervals=2)
    slow.add(9.0, explanation("first"), now=0.0)
    assert (slow.least_s, slow.ends) == (9.0, 10.0)
    slow.add(1.0, explanation("second"), now=11.0)
    assert names(slow, now=12.0) == ["first", "second"]
    assert names(slow, now=35.0) == ["second"]
    slow.add(2.0, explanation("third"), now=40.0)
    assert names(slow, now=41.0) == ["third"]


def test_models_are_compared():
    one, other = SlowRequests(), SlowRequests()
    one.add(1.0, explanation("fast"), now=0.0)
    other.add(2.0, explanation("slow"), now=0.0)
    assert [found.request_id for found in slowest_of([one, other], 5, 0.0)] == ["slow", "fast"]


def test_explanation_has_the_time_of_arrival_and_the_others():
    found = explanation(shared_with=["r", "a", "b"])
    assert found.shared_with == ["a", "b"]
    assert found.arrived == "1969-12-31T23:59:58.000Z"
    assert (found.total_ms, [part.name for part in found.parts]) == (2000.0, ["queue", "worker"])


def test_what_happened_meanwhile_is_in_order_and_nothing_that_was_over_before():
    work = Work(
        10.6,
        11.9,
        0.0,
        1.0,
        generation=GenerationWork(0.1, 1, 0, 1, num_preempted=2),
        pauses=[("garbage collection", 11.0, 0.25), ("compilation", 9.0, 0.5)],
    )
    times = JobTimes(10.0, 10.5, 10.5, 12.0, "w", 1, work, retried=10.25)
    found = explanation(times=times, crashes=1, loaded=("loading the model", 9.5, 1.0))
    assert [(event.what, event.after_ms, event.ms) for event in found.meanwhile] == [
        ("loading the model", 0.0, 1000.0),
        ("retry after 1 worker exited", 0.0, 250.0),
        ("preemption (2 of its sequences)", 600.0, 0.0),
        ("garbage collection", 1000.0, 250.0),
    ]
    assert found.generation.preemptions == 2
