"""Stages of a served handler are timed, and the handler does not notice."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import time

import pytest

from flambeau.worker.stage_clock import PauseLog, StageClock


class Staged:
    def preprocess(self, data):
        return data

    def inference(self, data, *, scale=1):
        time.sleep(0.002)
        return data * scale

    def postprocess(self, data):
        if data < 0:
            raise ValueError("negative")
        return [data]

    def handle(self, data, context=None):
        return self.postprocess(self.inference(self.preprocess(data), scale=2))


class Slotted(Staged):
    __slots__ = ()


class Frozen:
    __slots__ = ()
    preprocess = inference = postprocess = handle = Staged.preprocess


class Asynchronous(Staged):
    async def inference(self, data):
        return data


@pytest.fixture
def clock():
    return StageClock()


def test_stages_of_a_call_are_taken_once(clock):
    handler = Staged()
    clock.watch(handler)
    assert handler.handle(3) == [6]
    preprocess_s, inference_s, postprocess_s = clock.take()
    assert inference_s >= 0.002 > preprocess_s + postprocess_s
    assert clock.take() is None


def test_stage_that_fails_counts_until_then(clock):
    handler = Staged()
    clock.watch(handler)
    with pytest.raises(ValueError, match="negative"):
        handler.handle(-1)
    assert clock.take()[1] >= 0.002


def test_last_two_stages_are_taken_beside_the_first_of_the_next_batch(clock):
    handler = Staged()
    clock.watch(handler)
    inputs = handler.preprocess(1)
    preprocess_s = clock.take_preprocess()
    handler.preprocess(2)  # of the next batch
    handler.inference(inputs)
    assert clock.take(preprocess_s)[0] == preprocess_s > 0
    assert clock.take_preprocess() > 0


@pytest.mark.parametrize("handler", [object(), Frozen(), Asynchronous()], ids=["none", "no room", "async"])
def test_handler_whose_stages_cannot_be_timed_stays_as_it_is(clock, handler):
    clock.watch(handler)
    assert vars(handler) == {} if hasattr(handler, "__dict__") else True
    assert clock.take() is None


def test_timed_stage_stands_for_the_method(clock):
    handler = Staged()
    clock.watch(handler)
    assert handler.preprocess.__name__ == "preprocess"
    assert handler.preprocess.__self__ is handler
    assert [*inspect.signature(handler.inference).parameters] == ["data", "scale"]


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda handler: pickle.loads(pickle.dumps(handler))])
def test_copy_of_a_timed_handler_has_its_own_methods(clock, twin_of):
    handler = Staged()
    clock.watch(handler)
    twin = twin_of(handler)
    assert twin.handle(3) == [6]
    assert twin.preprocess.__self__ is twin
    assert clock.take() is None


def test_collections_that_take_time_are_noted(monkeypatch):
    monkeypatch.setattr("flambeau.worker.stage_clock.MIN_PAUSE_S", 0.0)
    log, began = PauseLog(), time.monotonic()
    log.start()
    try:
        assert log.since(began) is None
        gc.collect()
    finally:
        gc.callbacks.remove(log._on_collection)
    [(what, at, seconds)] = log.since(began)
    assert (what, at >= began, seconds >= 0) == ("garbage collection", True, True)
    assert log.since(time.monotonic()) is None


def test_short_pauses_are_left_out():
    log = PauseLog()
    log.begin("compilation")
    log.end("compilation")
    log.end("compilation")  # without a beginning
    assert not log.pauses
