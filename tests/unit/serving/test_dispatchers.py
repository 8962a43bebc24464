"""What a model's settings mean for its jobs."""

from __future__ import annotations

import pytest

from flambeau.config.model import ModelConfig
from flambeau.serving.dispatchers import batch_limits, contradictions


@pytest.mark.parametrize(
    ("parallel", "size"),
    [
        ({}, 1),
        ({"parallelType": "pp", "parallelLevel": 2}, 1),
        ({"parallelType": "tp", "parallelLevel": 2}, 4),
        ({"parallelType": "pptp", "torchrun": {"nproc-per-node": 2}}, 4),
        ({"parallelType": "tp"}, 1),  # one process after all
    ],
)
def test_ranks_in_step_begin_a_running_batch_together(parallel, size):
    config = ModelConfig().with_options({"batchSize": 4, "continuousBatching": True, **parallel})
    limits = batch_limits(config)
    assert (limits.size, limits.concurrency) == (size, 4)
    warnings = [*contradictions(config)]
    assert [("only when the running batch is over" in warning) for warning in warnings] == [True] * (size > 1)
