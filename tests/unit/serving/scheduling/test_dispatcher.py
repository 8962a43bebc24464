"""The timer of dispatchers, and that both of them are complete."""

from __future__ import annotations

import inspect

import pytest

from flambeau.serving.scheduling.batch_dispatcher import BatchDispatcher
from flambeau.serving.scheduling.dispatcher import Dispatcher, Timer
from flambeau.serving.scheduling.session_dispatcher import SessionDispatcher
from support.fake_workers import until


async def test_timer_calls_once_and_can_be_started_again():
    calls = []
    timer = Timer(lambda: calls.append(True))
    for count in (1, 2):
        timer.start(0.001)
        timer.start(0.001)
        await until(lambda count=count: len(calls) == count)
    timer.start(0.001)
    timer.cancel()
    timer.cancel()
    later = []
    Timer(lambda: later.append(True)).start(0.002)
    await until(lambda: later)
    assert len(calls) == 2


@pytest.mark.parametrize("dispatcher", [BatchDispatcher, SessionDispatcher])
def test_every_dispatcher_has_every_method(dispatcher):
    methods = [name for name, _ in inspect.getmembers(Dispatcher, inspect.isfunction) if not name.startswith("_")]
    assert methods == ["add", "close", "end_sequence", "feed", "on_worker_exit", "tick"]
    for name in methods:
        ours, wanted = inspect.signature(getattr(dispatcher, name)), inspect.signature(getattr(Dispatcher, name))
        assert ours == wanted
