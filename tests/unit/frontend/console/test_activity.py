"""Rates and percentiles from counters that grow."""

from __future__ import annotations

from collections import Counter

import pytest

from flambeau.frontend.console.activity import FIELDS, KEPT, WINDOW, Activity
from flambeau.metrics.traffic import SECONDS, HostTraffic, ModelTraffic, percentile
from flambeau.wire.messages import TOKEN_GAPS, EngineReport, GenerationWork, Work


class CountedModel:
    """The part of a model that is sampled."""

    def __init__(self, name="m"):
        self.name, self.version = name, "1.0"
        self.traffic = ModelTraffic(name, HostTraffic())
        self.answers = Counter()
        self.num_waiting = 0

    def answer(self, seconds, status=200, queue_s=0.0):
        self.traffic.answered(self.traffic.requested(None), seconds, queue_s, status)


def named(activity, model):
    return activity.recent((model.name, model.version))


def test_percentile_is_inside_the_bucket_of_its_value():
    counts = [0] * (len(SECONDS) + 1)
    counts[4] = 100  # 5 to 10 ms
    assert percentile(counts, 0.5) == pytest.approx(0.0075)
    assert percentile(counts, 0.99) == pytest.approx(0.00995)
    assert percentile([0] * len(counts), 0.5) is None


def test_values_beyond_the_last_bound_are_reported_as_that_bound():
    assert percentile([*([0] * len(SECONDS)), 3], 0.5) == SECONDS[-1]


def test_rates_are_per_second_and_errors_count_too():
    activity, model = Activity(), CountedModel()
    activity.add([model], 0.0)
    for _ in range(8):
        model.answer(0.027, queue_s=0.005)
    model.answer(0.027, status=500)
    model.answer(0.027, status=404)
    model.traffic.batch_done(5, 0.0)
    model.traffic.batch_done(5, 0.0)
    model.traffic.worked(Work(0.0, 0.012, read_s=0.001, handler_s=0.010, stages=(0.002, 0.005, 0.001)), 0.0)
    model.traffic.worked(Work(0.0, 0.032, read_s=0.001, handler_s=0.030, stages=(0.004, 0.015, 0.001)), 0.0)
    model.num_waiting = 3
    activity.add([model], 2.0)
    recent = named(activity, model)
    assert (recent["requests"], recent["errors"]) == (5.0, 1.0)
    assert 25 <= recent["p50"] <= 50
    assert recent["queue"] == pytest.approx(4.0)
    stages = [recent[name] for name in ("transfer", "preprocess", "inference", "postprocess", "handler")]
    assert stages == pytest.approx([3.0, 3.0, 10.0, 1.0, 6.0])
    assert (recent["batch"], recent["waiting"]) == (5.0, 3.0)


def test_wait_for_a_fuller_batch_is_no_queue():
    activity, model = Activity(), CountedModel()
    activity.add([model], 0.0)
    model.answer(0.02, queue_s=0.008)
    model.traffic.batch_waited(0.006)
    activity.add([model], 1.0)
    assert (named(activity, model)["queue"], named(activity, model)["batchWait"]) == pytest.approx((2.0, 6.0))


def test_engine_reports_tokens_gaps_and_its_load():
    activity, model = Activity(), CountedModel()
    activity.add([model], 0.0)
    assert named(activity, model)["kv"] is None
    work = GenerationWork(0.2, num_prompt=40, num_cached=30, num_tokens=11, num_drafted=8, num_accepted=6)
    model.traffic.generation.add(work, 0.0, 0.5)
    gaps = [0] * (len(TOKEN_GAPS) + 1)
    gaps[3] = 10  # 5 to 7.5 ms
    model.traffic.engine.add("w", EngineReport(3, 2, 100, 25, 0, 10, gaps, 0.06))
    activity.add([model], 1.0)
    recent = named(activity, model)
    assert (recent["tokens"], recent["firstToken"], recent["gap"]) == (11.0, 200.0, 6.25)
    assert [recent[name] for name in ("running", "sequences", "kv", "prefix", "accepted")] == [3, 2, 25.0, 75.0, 75.0]


def test_times_without_answers_have_no_percentile():
    activity, model = Activity(), CountedModel()
    activity.add([model], 0.0)
    activity.add([model], 1.0)
    assert named(activity, model)["p50"] is None
    assert named(activity, model)["requests"] == 0.0


def test_old_answers_leave_the_window():
    activity, model = Activity(), CountedModel()
    activity.add([model], 0.0)
    model.answer(0.1)
    for second in range(1, WINDOW + 3):
        activity.add([model], float(second))
    assert named(activity, model)["requests"] == 0.0


def test_history_is_bounded_and_ends_with_its_model():
    activity, model = Activity(), CountedModel()
    for second in range(KEPT + 5):
        activity.add([model], float(second))
    history = activity.history(("m", "1.0"))
    assert len(history) == KEPT
    assert all(len(sample) == len(FIELDS) for sample in history)
    activity.add([], 1000.0)
    assert activity.history(("m", "1.0")) == []
    assert activity.recent(("m", "1.0")) == {}
