"""Rates and percentiles from counters that grow."""

from __future__ import annotations

from collections import Counter

import pytest

from flambeau.frontend.console.activity import FIELDS, KEPT, WINDOW, Activity, percentile
from flambeau.metrics.traffic import SECONDS, HostTraffic, ModelTraffic


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


def test_values_beyond_the_last_bound_are_told_as_that_bound():
    assert percentile([*([0] * len(SECONDS)), 3], 0.5) == SECONDS[-1]


def test_rates_are_per_second_and_errors_count_too():
    activity, model = Activity(), CountedModel()
    activity.add([model], {}, 0.0)
    for _ in range(8):
        model.answer(0.02, queue_s=0.005)
    model.answer(0.02, status=500)
    model.answer(0.02, status=404)
    model.traffic.batch_done(5, 0.0)
    model.traffic.batch_done(5, 0.0)
    model.traffic.predicted(0.010, [])
    model.traffic.predicted(0.030, [])
    model.num_waiting = 3
    activity.add([model], {"m": 64.0}, 2.0)
    recent = named(activity, model)
    assert (recent["requests"], recent["errors"]) == (5.0, 1.0)
    assert 10 <= recent["p50"] <= 25
    assert recent["queue"] == pytest.approx(4.0)
    assert recent["handler"] == pytest.approx(20.0)
    assert (recent["batch"], recent["waiting"], recent["tokens"]) == (5.0, 3.0, 32.0)


def test_times_without_answers_have_no_percentile():
    activity, model = Activity(), CountedModel()
    activity.add([model], {}, 0.0)
    activity.add([model], {}, 1.0)
    assert named(activity, model)["p50"] is None
    assert named(activity, model)["requests"] == 0.0


def test_old_answers_leave_the_window():
    activity, model = Activity(), CountedModel()
    activity.add([model], {}, 0.0)
    model.answer(0.1)
    for second in range(1, WINDOW + 3):
        activity.add([model], {}, float(second))
    assert named(activity, model)["requests"] == 0.0


def test_history_is_bounded_and_ends_with_its_model():
    activity, model = Activity(), CountedModel()
    for second in range(KEPT + 5):
        activity.add([model], {}, float(second))
    history = activity.history(("m", "1.0"))
    assert len(history) == KEPT
    assert all(len(sample) == len(FIELDS) for sample in history)
    activity.add([], {}, 1000.0)
    assert activity.history(("m", "1.0")) == []
    assert activity.recent(("m", "1.0")) == {}
