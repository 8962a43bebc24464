"""The limits of keys, and what was used with them."""

from __future__ import annotations

import pytest

from flambeau.errors import KeyLimitReached, ModelNotAllowed
from flambeau.serving.job import HIGH, LOW, NORMAL
from flambeau.serving.key_metrics import key_metrics
from flambeau.serving.tenants import NO_LIMITS, KeyLimits, RateBucket, Tenant, Tenants
from flambeau.wire.messages import GenerationWork


def new_tenant(**limits):
    return Tenant("ann", KeyLimits(**limits), 0.0)


def made(num_prompt, num_tokens):
    return GenerationWork(0.0, num_prompt, 0, num_tokens)


def rejection(tenant, now=0.0, num_tokens=0):
    with pytest.raises(KeyLimitReached) as found:
        tenant.admit("m", num_tokens, now)
    return found.value


def test_bucket_is_refilled_within_a_minute():
    bucket = RateBucket(60, 0.0)
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == 1.0
    assert bucket.wait_s(30, 10.0) == 20.0
    assert bucket.remaining(30.0) == 30
    assert bucket.reset_s(30.0) == 30.0
    assert bucket.remaining(1000.0) == 60


def test_amount_beyond_the_capacity_needs_a_full_bucket_and_leaves_a_debt():
    bucket = RateBucket(60, 0.0)
    assert bucket.wait_s(90, 0.0) == 0
    bucket.take(90, 0.0)
    assert bucket.wait_s(1, 0.0) == 31.0


def test_requests_per_minute():
    tenant = new_tenant(requests_per_minute=2)
    tenant.admit("m", 0, 0.0)
    tenant.admit("m", 0, 0.0)
    found = rejection(tenant)
    assert found.retry_after_s == 30
    assert "ann is limited to 2 requests a minute" in str(found)
    tenant.admit("m", 0, 30.0)
    assert (tenant.num_requests, dict(tenant.num_rejected)) == (3, {"requests": 1})


def test_concurrent_requests():
    tenant = new_tenant(max_concurrent=1)
    tenant.admit("m", 0, 0.0)
    assert "1 requests at a time" in str(rejection(tenant))
    tenant.release(0, None, 0.0, is_used=True)
    tenant.admit("m", 0, 0.0)
    assert tenant.num_running == 1


def test_tokens_are_reserved_and_then_counted():
    tenant = new_tenant(tokens_per_minute=100)
    tenant.admit("m", 80, 0.0)
    assert "may need 50" in str(rejection(tenant, num_tokens=50))
    tenant.release(80, made(10, 20), 0.0, is_used=True)
    [rate] = tenant.rates(0.0)
    assert (rate.name, rate.limit, rate.remaining) == ("tokens", 100, 70)
    assert (tenant.num_prompt_tokens, tenant.num_output_tokens) == (10, 20)


@pytest.mark.parametrize(("is_used", "remaining"), [(True, 20), (False, 100)])
def test_request_that_was_cancelled_counts_as_assumed_if_it_had_begun(is_used, remaining):
    tenant = new_tenant(tokens_per_minute=100)
    tenant.admit("m", 80, 0.0)
    tenant.release(80, None, 0.0, is_used=is_used)
    assert next(tenant.rates(0.0)).remaining == remaining


def test_other_models_are_not_allowed():
    tenant = new_tenant(models=("a", "b"))
    tenant.admit("a", 0, 0.0)
    with pytest.raises(ModelNotAllowed, match="only a, b"):
        tenant.admit("c", 0, 0.0)
    assert tenant.num_requests == 1


def test_priority_of_a_key_is_a_default_and_a_limit():
    assert [new_tenant().priority_of(rank) for rank in (HIGH, NORMAL, LOW)] == [HIGH, NORMAL, LOW]
    assert [new_tenant(priority=LOW).priority_of(rank) for rank in (HIGH, NORMAL, LOW)] == [LOW, LOW, LOW]
    assert [new_tenant(priority=HIGH).priority_of(rank) for rank in (HIGH, NORMAL, LOW)] == [HIGH, HIGH, LOW]


def test_changed_limits_count_and_use_is_kept():
    tenants = Tenants()
    tenants.update({"ann": KeyLimits(requests_per_minute=1), "bob": NO_LIMITS}, 0.0)
    tenants["ann"].admit("m", 0, 0.0)
    tenants.update({"ann": KeyLimits(requests_per_minute=1)}, 0.0)
    rejection(tenants["ann"])
    tenants.update({"ann": NO_LIMITS}, 0.0)
    tenants["ann"].admit("m", 0, 0.0)
    assert tenants["ann"].num_requests == 2
    assert [tenant.name for tenant in tenants] == ["ann", "bob"]


def test_metrics_of_keys_that_were_used():
    used, idle = new_tenant(requests_per_minute=1), Tenant("bob", NO_LIMITS, 0.0)
    used.admit("m", 0, 0.0)
    rejection(used)
    used.release(0, made(3, 4), 0.0, is_used=True)
    found = {family.name: family.values for family in key_metrics([used, idle])}
    key = ("key", "ann")
    assert found["flambeau_key_requests_total"] == {(key,): 1}
    assert found["flambeau_key_tokens_total"] == {(key, ("kind", "prompt")): 3, (key, ("kind", "output")): 4}
    assert found["flambeau_key_rejected_total"] == {(key, ("limit", "requests")): 1}
    assert [*key_metrics([idle])] == []
