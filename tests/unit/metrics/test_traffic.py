"""Counters of requests, answers and batches."""

from __future__ import annotations

import pytest

from flambeau.metrics.traffic import HostTraffic, ModelTraffic, smoothed
from flambeau.wire.messages import GenerationWork, Work


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


def test_time_of_a_generation_is_split_at_its_first_token():
    traffic = ModelTraffic("m", HostTraffic())
    two = GenerationWork(0.2, num_prompt=7, num_cached=0, num_tokens=22, finish_reasons=["stop", "length"])
    one = GenerationWork(0.1, num_prompt=7, num_cached=0, num_tokens=1, finish_reasons=["length"])
    traffic.worked(Work(10.0, 11.2, 0.0, 1.2, generation=two), 0.3)
    traffic.worked(Work(20.0, 20.1, 0.0, 0.1, generation=one), 0.3)
    made = traffic.generation
    assert made.prefill.total == pytest.approx(0.3)
    assert (made.decode.total, made.decode.number) == (pytest.approx(1.0), 2)
    assert (made.token_times.total, made.token_times.number) == (pytest.approx(0.1), 1)  # 10 gaps in each choice
    assert made.finish_reasons == {"stop": 1, "length": 2}


def test_service_time_follows_a_slow_down_at_once():
    assert smoothed(None, 0.5) == 0.5
    assert smoothed(0.001, 1.0) == 1.0
    assert 0.9 < smoothed(1.0, 0.001) < 1.0
