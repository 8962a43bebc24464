"""What is done when memory is short."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from flambeau.config.server import ServerConfig
from flambeau.serving.server import Server
from flambeau.serving.workers import elasticity
from flambeau.serving.workers.autoscaling import Limits
from flambeau.serving.workers.elasticity import Elasticity

LIMITS = Limits(minimum=1, maximum=3)


class Supervisor:
    """One worker that is busy, and a list of what it was told."""

    def __init__(self) -> None:
        self.num_present = 1
        self.num_ready = 1
        self.load_s = 0.1
        self.has_failed_for_good = False
        self.calls = []

    def scale(self, minimum, maximum):
        self.calls.append((minimum, maximum))


def look_for_3_s(supervisor, make_room, looks=30):
    """A job has waited for long, at every look."""

    async def look():
        loop = asyncio.get_running_loop()
        worker = SimpleNamespace(batches=[1], is_retiring=False, is_ready=True, pids=[1])
        elastic = Elasticity("m", supervisor, [worker], Queue(loop.time() - 10), make_room)
        began = loop.time() + 2
        for i in range(looks):
            loop.time = lambda i=i: began + 0.1 * i
            elastic.look(LIMITS)

    asyncio.run(look())


class Queue:
    def __init__(self, arrived):
        self.oldest = SimpleNamespace(arrived=arrived)


@pytest.fixture
def memory(monkeypatch):
    def set_memory(left, used):
        monkeypatch.setattr(elasticity, "available_bytes", lambda: left)
        monkeypatch.setattr(elasticity, "resident_bytes_of", lambda pids: used)

    return set_memory


def test_model_grows_where_there_is_memory(memory):
    memory(left=900 << 20, used=500 << 20)
    supervisor = Supervisor()
    look_for_3_s(supervisor, lambda: False, looks=5)
    assert supervisor.calls == [(2, 2)]


def test_model_does_not_grow_beyond_memory_and_says_so_once(memory, caplog):
    memory(left=500 << 20, used=500 << 20)
    supervisor = Supervisor()
    look_for_3_s(supervisor, lambda: False)
    assert supervisor.calls == []
    assert caplog.text.count("one takes 500 MB, and 500 MB of memory are left") == 1


def test_another_model_makes_room_first(memory, caplog):
    memory(left=500 << 20, used=500 << 20)
    asked = []
    look_for_3_s(supervisor := Supervisor(), lambda: asked.append(1) or True)
    assert asked
    assert supervisor.calls == []  # what is given back is taken at a later look
    assert "gets no more" not in caplog.text


def new_model(arrived, *, sleeps=True, jobs=0, ready=True):
    calls = []
    limits = Limits(minimum=1, maximum=1, scales_to_zero=sleeps)
    elastic = SimpleNamespace(last_arrival=arrived, sleep=lambda: calls.append("sleep"))
    supervisor = SimpleNamespace(has_ready=ready)
    return SimpleNamespace(limits=limits, elasticity=elastic, supervisor=supervisor, num_in_flight=jobs, calls=calls)


def test_model_that_was_not_asked_for_longest_makes_room():
    models = [
        new_model(1.0, sleeps=False),
        new_model(2.0, jobs=1),
        new_model(3.0, ready=False),
        new_model(5.0),
        new_model(4.0),
    ]
    server = Server(ServerConfig())
    server.registry = models
    assert server._make_room()
    assert [model.calls for model in models] == [[], [], [], [], ["sleep"]]
    server.registry = models[:3]
    assert not server._make_room()


def test_model_that_cannot_be_loaded_any_more_does_not_grow():
    supervisor = Supervisor()
    supervisor.has_failed_for_good = True
    look_for_3_s(supervisor, lambda: True)
    assert supervisor.calls == []
