"""What is measured of each generation, when it is over: a handful of numbers, as `context.metrics` takes them."""

from __future__ import annotations

from typing import Any

from flambeau.handlers.generation.jobs import RunningJob
from flambeau.metrics.definitions import MetricTypes


class Measuring:
    """Counts tokens of prompts and texts, and tells how quick they came."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics
        self._gauge = MetricTypes.GAUGE

    def __call__(self, job: RunningJob, now: float) -> None:
        """Take note of a job that is over."""
        metrics = self._metrics
        if set_ids := getattr(metrics, "set_request_ids", None):
            set_ids({0: job.request.request_id})
        made = sum(counts.num_generated for counts in job.counts)
        drafted = sum(counts.num_drafted for counts in job.counts)
        metrics.add_counter("PromptTokens", sum(counts.num_prompt for counts in job.counts))
        metrics.add_counter("CachedPromptTokens", sum(counts.num_cached for counts in job.counts))
        metrics.add_counter("GeneratedTokens", made)
        metrics.add_time("TimeToFirstToken", round((job.first_at - job.began) * 1000, 3))
        if now > job.first_at and made > 1:
            per_second = round((made - 1) / (now - job.first_at), 3)
            metrics.add_metric("TokensPerSecond", per_second, "count", metric_type=self._gauge)
        if drafted:
            accepted = sum(counts.num_accepted for counts in job.counts)
            metrics.add_counter("DraftedTokens", drafted)
            metrics.add_counter("AcceptedTokens", accepted)
            metrics.add_percent("DraftAcceptance", round(100 * accepted / drafted, 2))
