"""Counters of requests, answers and batches."""

from __future__ import annotations

from flambeau.metrics.traffic import HostTraffic, ModelTraffic, smoothed


def test_successful_answers_count_for_the_version_that_was_named():
    traffic = ModelTraffic("m", HostTraffic())
    traffic.answered(traffic.requested("2.0"), 0.002, 0.001, 200)
    traffic.answered(traffic.requested(None), 0.002, 0.001, 503)
    named, default = traffic.host.counts["m", "2.0"], traffic.host.counts["m", "default"]
    assert (named.num_requests, named.num_answered, default.num_requests, default.num_answered) == (1, 1, 1, 0)
    assert named.latency_us == 2000
    assert {status: sum(times.counts) for status, times in traffic.by_class.items()} == {2: 1, 5: 1}


def test_a_clock_that_goes_back_does_not_make_a_negative_queue_time():
    traffic = ModelTraffic("m", HostTraffic())
    traffic.answered(traffic.requested(None), 0.002, -0.001, 200)
    assert traffic.queue.total == 0.0


def test_service_time_follows_a_slow_down_at_once():
    assert smoothed(None, 0.5) == 0.5
    assert smoothed(0.001, 1.0) == 1.0
    assert 0.9 < smoothed(1.0, 0.001) < 1.0
