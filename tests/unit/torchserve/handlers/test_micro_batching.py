from __future__ import annotations

import threading

import pytest

from flambeau.errors import ConfigError
from flambeau.torchserve.handlers.micro_batching import HANDLER_METHODS, MicroBatching
from flambeau.worker.context import Context


class Stages:
    """Counts who runs at the same time; 13 fails in `inference`.

    With a `goal`, only the first `passing` calls of a stage return before the goal is reached.
    """

    def __init__(self):
        self.running = dict.fromkeys(HANDLER_METHODS, 0)
        self.most_together = 0
        self.most = dict.fromkeys(HANDLER_METHODS, 0)
        self.indices = []
        self.changed = threading.Condition()
        self.goal = None
        self.passing = dict.fromkeys(HANDLER_METHODS, 0)
        self.kind = ""
        self.context = None

    def stage(self, name, data):
        with self.changed:
            self.running[name] += 1
            self.most[name] = max(self.most[name], self.running[name])
            self.most_together = max(self.most_together, sum(count > 0 for count in self.running.values()))
            self.passing[name] -= 1
            self.changed.notify_all()
            if self.goal is not None and self.passing[name] < 0:
                assert self.changed.wait_for(self.goal, 30)
            self.running[name] -= 1
        return data

    def preprocess(self, data):
        return self.stage("preprocess", data)

    def inference(self, data):
        self.indices.append((self.batching.get_micro_batch_idx(), data))
        if 13 in data:
            raise ValueError("unlucky")
        return self.stage("inference", data)

    def postprocess(self, data):
        return [item * 2 for item in self.stage("postprocess", data)]

    def explain_handle(self, inputs, raw):
        return ["explained", inputs, raw]

    def describe_handle(self):
        return "described"

    def _is_explain(self):
        return self.kind == "explain"

    def _is_describe(self):
        return self.kind == "describe"


@pytest.fixture
def made():
    all_made = []

    def make(**options):
        handler = Stages()
        handler.batching = MicroBatching(handler, **options)
        all_made.append(handler.batching)
        return handler, handler.batching

    yield make
    for batching in all_made:
        batching.shutdown()


@pytest.fixture
def context():
    return Context("m", "/", None, 1, None, "1")


def test_results_come_in_order_and_stages_overlap(made, context):
    handler, batching = made(micro_batch_size=2)
    handler.goal = lambda: handler.most_together == 3
    handler.passing = {"preprocess": 2, "inference": 1, "postprocess": 0}
    assert batching([*range(9)], context) == [i * 2 for i in range(9)]
    assert sorted(handler.indices) == [(0, [0, 1]), (1, [2, 3]), (2, [4, 5]), (3, [6, 7]), (4, [8])]
    assert handler.context is context
    assert [sample[0] for sample in context.metrics.take()] == ["HandlerTime"]


def test_parallelism_is_threads_per_stage(made, context):
    handler, batching = made(parallelism={"inference": 3})
    assert batching.parallelism == {"preprocess": 1, "inference": 3, "postprocess": 1}
    batching.parallelism = {"preprocess": 4, "inference": 1}
    assert {name: len(group) for name, group in batching.thread_groups.items()} == batching.parallelism
    handler.goal = lambda: handler.most["preprocess"] == 4
    assert batching([*range(12)], context) == [i * 2 for i in range(12)]
    assert handler.most["inference"] == 1


@pytest.mark.parametrize("wrong", [{"predict": 1}, {"inference": 0}, {"inference": "2"}])
def test_invalid_parallelism_is_rejected(made, wrong):
    with pytest.raises(ConfigError, match="micro batching"):
        made(parallelism=wrong)


def test_error_of_a_stage_reaches_the_caller_and_the_next_batch_runs(made, context):
    _, batching = made()
    with pytest.raises(ValueError, match="unlucky"):
        batching([1, 13, 2], context)
    assert batching([3], context) == [6]


def test_explain_and_describe_pass_by(made, context):
    handler, batching = made()
    handler.kind = "explain"
    assert batching([1], context) == ["explained", [1], [1]]
    handler.kind = "describe"
    assert batching([1], context) == ["described"]


def test_threads_end_at_shutdown(made, context):
    _, batching = made(parallelism={"inference": 2})
    threads = [worker.thread for group in batching.thread_groups.values() for worker in group]
    assert len(threads) == 4
    batching.shutdown()
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(RuntimeError, match="shut down"):
        batching([1], context)


def test_empty_batch_is_an_empty_answer(made, context):
    assert made()[1]([], context) == []
