"""The metrics of keys: requests, tokens, and requests over a limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flambeau.metrics.registry import Labels, MetricFamily
from flambeau.serving.tenants import Tenant


def key_metrics(tenants: Iterable[Tenant]) -> Iterator[MetricFamily]:
    """Only of keys that were used."""
    requests = MetricFamily("flambeau_key_requests_total", "counter", "Requests accepted, by key.")
    running = MetricFamily("flambeau_key_requests_running", "gauge", "Requests accepted and not over, by key.")
    tokens = MetricFamily("flambeau_key_tokens_total", "counter", "Tokens of prompts and outputs, by key.")
    rejected = MetricFamily("flambeau_key_rejected_total", "counter", "Requests over a limit, by key and limit.")
    for tenant in tenants:
        if not (tenant.num_requests or tenant.num_rejected):
            continue
        labels: Labels = (("key", tenant.name),)
        requests.values[labels] = tenant.num_requests
        running.values[labels] = tenant.num_running
        tokens.values[*labels, ("kind", "prompt")] = tenant.num_prompt_tokens
        tokens.values[*labels, ("kind", "output")] = tenant.num_output_tokens
        for name, number in tenant.num_rejected.items():
            rejected.values[*labels, ("limit", name)] = number
    yield from (family for family in (requests, running, tokens, rejected) if family.values)
