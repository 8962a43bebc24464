"""When a batch leaves, and how many a worker gets in advance."""

from __future__ import annotations

import pytest

from flambeau.serving.scheduling.batch_policy import (
    MAX_IN_FLIGHT_FAST,
    BatchLimits,
    held_tenants,
    may_send_ahead,
    wait_s,
)

FAST, SLOW = 0.0001, 0.5


def test_idle_worker_never_waits_unless_the_model_asks_for_it():
    assert wait_s(1, 0.0, BatchLimits(size=8)) == 0


def test_batch_leaves_when_it_is_full_or_its_oldest_job_has_waited_long_enough():
    limits = BatchLimits(size=8, delay_s=0.1)
    assert wait_s(7, 0.04, limits) == pytest.approx(0.06)
    assert wait_s(8, 0.0, limits) == 0
    assert wait_s(1, 0.1, limits) <= 0


def ahead(waiting, in_flight, service_s, size=1, only=False):
    return may_send_ahead(waiting, in_flight, service_s, BatchLimits(size=size), is_only_worker=only)


def test_fast_worker_gets_batches_in_advance_and_a_slow_one_is_not():
    assert ahead(1, 1, FAST)
    assert not ahead(1, MAX_IN_FLIGHT_FAST, FAST)
    assert not ahead(1, 1, SLOW)
    assert not ahead(1, 1, None)


def test_only_worker_gets_one_batch_in_advance():
    assert ahead(1, 1, SLOW, only=True)
    assert not ahead(1, 2, SLOW, only=True)


def test_only_full_batches_are_sent_ahead():
    assert not ahead(3, 1, FAST, size=4)
    assert ahead(4, 1, FAST, size=4)


def test_tenant_leaves_places_for_others_of_the_last_minute():
    both = {"a": 0.0, "b": 5.0}
    assert held_tenants(16, {"a": 14}, both, 10.0) == {"a"}
    assert held_tenants(16, {"a": 13}, both, 10.0) == set()
    assert held_tenants(4, {"a": 3}, both, 10.0) == {"a"}


def test_last_places_are_for_tenants_that_have_none():
    recent = {"a": 0.0, "b": 0.0, "c": 0.0}
    assert held_tenants(16, {"a": 7, "b": 7}, recent, 10.0) == {"a", "b"}
    assert held_tenants(16, {"a": 7, "b": 6}, recent, 10.0) == set()
    assert held_tenants(16, {"a": 7, "b": 7, "c": 1}, recent, 10.0) == set()
    assert held_tenants(16, {"a": 7, "b": 7}, {**recent, "c": -60.0}, 10.0) == set()


def test_tenant_that_is_alone_may_have_all_places():
    assert held_tenants(16, {"a": 15}, {"a": 0.0}, 10.0) == set()
    assert held_tenants(16, {"a": 15}, {"a": 60.0, "b": 0.0}, 60.0) == set()
    assert held_tenants(1, {"a": 1}, {"a": 0.0, "b": 0.0}, 0.0) == set()
