"""What a model's settings mean for its jobs."""

from __future__ import annotations

import pytest

from flambeau.config.model import ModelConfig
from flambeau.serving.dispatcher_factory import batch_limits, contradictions


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


@pytest.mark.parametrize(
    ("options", "schedule", "num_together", "words"),
    [
        ({"batchSize": 4}, "batches", 4, []),
        ({"batchSize": 4, "asyncCommunication": True}, "async", 1, ["batchSize 4"]),
        ({"asyncCommunication": True}, "async", 1, []),
        ({"batchSize": 4, "continuousBatching": True}, "continuous", 4, []),
        ({"continuousBatching": True, "asyncCommunication": True}, "continuous", 1, ["continuousBatching"]),
        ({"batchSize": 4, "sequenceBatching": True}, "sequences", 4, ["sequenceMaxIdleMSec"]),
        (
            {"sequenceBatching": True, "sequenceMaxIdleMSec": 5, "asyncCommunication": True},
            "sequences",
            1,
            ["sequenceBa"],
        ),
        (
            {"batchSize": 4, "sequenceBatching": True, "sequenceMaxIdleMSec": 5, "continuousBatching": True},
            "continuous",
            8,
            [],
        ),
    ],
)
def test_one_way_of_scheduling_wins_and_the_others_are_named(options, schedule, num_together, words):
    config = ModelConfig().with_options(options)
    assert (config.schedule, config.num_together) == (schedule, num_together)
    warnings = [*contradictions(config)]
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))
