"""A model: which jobs it accepts, and what becomes of those whose worker exits."""

from __future__ import annotations

import asyncio
import signal

import pytest

from flambeau.config.model import ModelConfig
from flambeau.config.server import MetricsConfig, ServerConfig
from flambeau.errors import BadRequest, DeadlinePassed, ModelRemoved, QueueFull, Unavailable, WorkerDied, WorkersFailed
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.model import REMEDY, no_worker, not_loaded, queue_full, rejected
from flambeau.serving.server import Server
from flambeau.wire.messages import Part
from support.fake_workers import CRASH, FakeWorker, until
from support.jobs import new_job

KILLED = WorkerExit(reason="killed", signal=signal.SIGKILL)
CANNOT_LOAD = WorkerExit(reason="no such file", while_loading=True)


@pytest.fixture(autouse=True)
def workers(monkeypatch):
    monkeypatch.setattr("flambeau.serving.workers.worker_factory.RemoteWorker", FakeWorker)
    FakeWorker.all = []
    return FakeWorker.all


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "handler.py").write_text("def handle(data, context):\n    return data\n")
    return tmp_path


class Served:
    """A server with one model, whose workers are fakes."""

    def __init__(self, folder, **settings):
        self._folder = folder
        self._config = ModelConfig(**{"min_workers": 1, "max_workers": 1, **settings})
        self._server = Server(
            ServerConfig(measure=MetricsConfig(system=False), drain_timeout_s=0.1, crash_folder=folder / "crashes")
        )

    async def __aenter__(self):
        await self._server.__aenter__()
        return await self._server.register(
            "m", path=self._folder, name="m", handler="handler.py", config=self._config, wait=False
        )

    async def __aexit__(self, *error):
        await self._server.__aexit__(*error)


async def test_job_goes_to_a_ready_worker(folder, workers):
    async with Served(folder) as model:
        await until(lambda: workers)
        waiting = new_job()
        model.add(waiting)
        assert model.num_waiting == model.num_in_flight == 1
        workers[0].load()
        assert workers[0].sent == [[waiting]]
        model.add(direct := new_job())
        assert workers[0].sent[1:] == [[direct]]
        assert waiting.usage.num_requests == 2


async def test_description_is_not_counted_as_a_request(folder, workers):
    async with Served(folder) as model:
        described, asked = new_job(kind="describe"), new_job()
        model.add(described)
        model.add(asked)
        assert described.usage is None
        assert asked.usage.num_requests == 1


async def test_full_queue_rejects_with_a_time_to_retry(folder, workers):
    async with Served(folder, queue_size=3) as model:
        model.traffic.num_ahead = 2  # jobs sent in advance wait, too
        model.add(new_job())
        assert model.num_waiting == 3
        with pytest.raises(QueueFull, match="All 3 places") as caught:
            model.add(new_job())
        assert caught.value.retry_after_s == 1


async def test_model_without_workers_rejects(folder):
    async with Served(folder, min_workers=0, max_workers=0) as model:
        with pytest.raises(Unavailable, match="has no worker to serve inference request"):
            model.add(new_job())


async def test_sleeping_model_starts_a_worker_for_a_job(folder, workers):
    async with Served(folder, min_workers=0, max_workers=1) as model:
        assert model.pool.is_sleeping
        model.add(job := new_job())
        await until(lambda: workers)
        workers[0].load()
        assert workers[0].sent == [[job]]


async def test_waiting_jobs_fail_when_the_model_cannot_be_loaded(folder, workers):
    async with Served(folder) as model:
        model.add(job := new_job())
        await until(lambda: workers)
        workers[0].kill(CANNOT_LOAD)
        await until(lambda: job.is_over)
        assert "no such file" in str(job.receiver.errors[0])
        with pytest.raises(Unavailable, match="is tried again: no such file"):
            model.add(new_job())


async def test_waiting_jobs_go_to_the_version_that_stands_in_unless_a_worker_has_crashed_with_them(folder, workers):
    (folder / "other").mkdir()
    (folder / "other" / "handler.py").touch()
    async with Served(folder) as model, Served(folder / "other", queue_size=1) as default:
        moved, suspect, surplus, named = jobs = [new_job() for _ in range(4)]
        suspect.crashes, versions = 1, []
        for job in jobs:
            model.add(job)
        for job in (moved, suspect, surplus):
            default.stand_in_for(model, job, versions.append)
        await until(lambda: len(workers) == 2)
        workers[0].kill(CANNOT_LOAD)
        await until(lambda: named.is_over)
        assert [job.is_over for job in jobs] == [False, True, True, True]  # one place is free there
        assert versions == [default]
        workers[1].load()
        assert workers[1].sent == [[moved]]
        assert moved.move is None  # that version is the last


async def test_ticket_is_needed_where_the_model_asks_for_it(folder, workers):
    async with Served(folder, use_job_ticket=True) as model:
        await until(lambda: workers)
        with pytest.raises(Unavailable, match="useJobTicket"):
            model.add(new_job())
        workers[0].load()
        model.add(new_job())


async def test_job_expires_in_the_queue(folder, workers):
    async with Served(folder, client_timeout_s=0.01) as model:
        job = new_job()
        job.arrived = asyncio.get_running_loop().time()
        model.add(job)
        await until(lambda: job.is_over)
        assert [type(error) for error in job.receiver.errors] == [DeadlinePassed]
        assert model.num_waiting == 0


@pytest.mark.parametrize(
    ("own_s", "limit_s", "named"),
    [
        (0.01, None, "0.01 s (x-flambeau-timeout)"),
        (0.01, 60, "0.01 s (x-flambeau-timeout)"),
        (60, 0.01, "10 ms (clientTimeoutInMills)"),
    ],
)
async def test_shorter_limit_of_request_and_model_holds_and_is_named(folder, workers, own_s, limit_s, named):
    async with Served(folder, client_timeout_s=limit_s) as model:
        job = new_job()
        job.arrived, job.timeout_s = asyncio.get_running_loop().time(), own_s
        model.add(job)
        await until(lambda: job.is_over)
        assert named in str(job.receiver.errors[0])


async def test_job_that_was_alone_in_a_crashed_worker_fails_and_the_others_wait_again(folder, workers):
    async with Served(folder) as model:
        suspect, innocent = new_job(), new_job()
        model._on_worker_exit(model.pool.slots[0], CRASH, [(suspect, 1)], [innocent])
        assert [type(error) for error in suspect.receiver.errors] == [WorkerDied]
        assert model.queue.take_all() == [innocent]


async def test_job_whose_worker_was_killed_is_retried_alone_and_three_times(folder, workers):
    async with Served(folder) as model:
        job = new_job()
        for _ in range(3):
            model._on_worker_exit(model.pool.slots[0], KILLED, [(job, 1)], [])
            assert model.queue.take_all() == [job]
            assert job.is_alone
            assert job.is_suspect
        model._on_worker_exit(model.pool.slots[0], KILLED, [(job, 1)], [])
        assert [type(error) for error in job.receiver.errors] == [WorkerDied]


async def test_generations_whose_worker_was_killed_resume_together(folder, workers):
    async with Served(folder) as model:
        model.abilities = frozenset(["generate"])
        job = new_job()
        model._on_worker_exit(model.pool.slots[0], KILLED, [(job, 1)], [])
        assert not job.is_suspect


async def test_abilities_are_those_of_a_ready_worker(folder, workers):
    async with Served(folder) as model:
        await until(lambda: workers)
        workers[0].abilities, workers[0].max_length = ["generate"], 512
        workers[0].load()
        await until(lambda: model.abilities)
        assert (model.abilities, model.max_length) == ({"generate"}, 512)


async def test_model_is_reported_as_loaded_once(folder, workers, caplog):
    caplog.set_level("INFO")
    async with Served(folder, min_workers=2, max_workers=2):
        await until(lambda: len(workers) == 2)
        for worker in workers:
            worker.load()
        await asyncio.sleep(0)
    assert [getattr(record, "event", "") for record in caplog.records].count("model_loaded") == 1


async def test_model_that_can_never_answer_in_time_gets_no_workers(folder):
    async with Served(folder, min_workers=0, max_workers=0, response_timeout_s=0) as model:
        with pytest.raises(WorkersFailed):
            await model.scale(1, 1, wait=True)


async def test_closed_model_gets_no_workers_and_rejects_what_waits(folder, workers):
    async with Served(folder) as model:
        await until(lambda: workers)
        model.add(job := new_job())
        await model.close("The model is gone.", now=True)
        assert [str(error) for error in job.receiver.errors] == ["The model is gone."]
        with pytest.raises(ModelRemoved, match="unregistered"):
            await model.scale(2, 2, wait=False)
        assert len(workers) == 1


def test_text_is_torchserves_quotes_and_all():
    assert str(rejected("m", None)) == f'Model "m" has no worker to serve inference request. {REMEDY}'
    assert str(rejected("m", "2")) == f'Model "m" Version 2" has no worker to serve inference request. {REMEDY}'


def test_what_is_ours_follows():
    assert str(no_worker("m", None, CRASH)).endswith(f"{REMEDY}. The last worker: exited with code 1")
    assert str(no_worker("m", None, None)).endswith(REMEDY)
    assert str(not_loaded("m", CRASH)) == 'Model "m" has no worker yet and is tried again: exited with code 1'


def test_full_queue_says_when_to_come_again():
    assert queue_full("m", None, 10, drained_in_s=0.1).retry_after_s == 1
    error = queue_full("m", "1", 10, drained_in_s=7.6)
    assert error.retry_after_s == 8
    assert "All 10 places" in str(error)


@pytest.mark.parametrize(("minimum", "maximum", "name"), [(1001, 1001, "min_worker"), (1, 1001, "max_worker")])
async def test_more_workers_than_a_model_may_have_are_refused(folder, workers, minimum, maximum, name):
    async with Served(folder) as model:
        with pytest.raises(BadRequest, match=f"{name} is 1001; .* 1000 workers"):
            await model.scale(minimum, maximum, wait=False)
        assert len(model.pool.slots) == 1


async def test_model_with_too_many_workers_is_not_registered(folder):
    async with Server(ServerConfig(measure=MetricsConfig(system=False), max_workers_per_model=2)) as server:
        config = ModelConfig(min_workers=3, max_workers=3)
        with pytest.raises(BadRequest, match="min_worker is 3"):
            await server.register("m", path=folder, name="m", handler="handler.py", config=config)
        assert [*server.registry] == []


async def test_workers_that_cannot_fit_into_memory_are_refused_and_others_are_not(folder, workers, monkeypatch):
    monkeypatch.setattr("flambeau.serving.model.available_bytes", lambda: 900 << 20)
    monkeypatch.setattr("flambeau.serving.model.free_swap_bytes", lambda: 100 << 20)
    async with Served(folder) as model:
        await until(lambda: workers)
        await model.scale(2, 2, wait=False)  # what a worker takes is not known yet
        await until(lambda: len(workers) == 2)
        for worker, size in zip(workers, (200 << 20, 700 << 20), strict=True):
            worker.load()
            worker.loaded_bytes = size
        with pytest.raises(WorkersFailed) as caught:
            await model.scale(8, 8, wait=False)
        assert caught.value.out_of_memory
        assert caught.value.cause == (
            "6 more workers need at least 1200 MB of memory, 200 MB each, and 900 MB are left; ask for fewer workers"
        )
        assert len(model.pool.slots) == model.pool.max_workers == 2
        await model.scale(7, 7, wait=False)
        await model.scale(1, 1, wait=False)


async def test_kept_replies_need_no_worker_and_those_that_wait_for_one_count_as_owed(folder, workers):
    async with Served(folder, response_cache_mb=1, queue_size=3) as model:
        await until(lambda: workers)
        workers[0].load()
        first, joined = new_job(), new_job()
        model.add(first)
        model.add(joined)
        assert (workers[0].sent, model.num_owed, model.num_in_flight) == ([[first]], 1, 1)
        model.add(third := new_job())
        model.add(fourth := new_job())
        with pytest.raises(QueueFull):  # they take places
            model.add(new_job())
        first.deliver([Part(first.id, b"kept")])
        await asyncio.sleep(0)
        assert [job.receiver.parts[0].body for job in (joined, third, fourth)] == [b"kept"] * 3
        workers[0].kill(KILLED)
        model.add(again := new_job())
        assert again.receiver.parts[0].body == b"kept"
        assert again.usage.num_requests == 5 + 1


async def test_jobs_that_waited_for_another_ones_reply_go_to_a_worker_or_end_with_the_model(folder, workers):
    async with Served(folder, response_cache_mb=1) as model:
        await until(lambda: workers)
        workers[0].load()
        first, joined, last = (new_job() for _ in range(3))
        model.add(first)
        model.add(joined)
        first.cancel()
        await asyncio.sleep(0)
        assert workers[0].sent == [[first], [joined]]
        joined.fail(WorkerDied(cause=""))
        await asyncio.sleep(0)
        model.add(first := new_job())
        model.add(last)
        await model.close("closed", now=True)
        first.fail(WorkerDied(cause=""))
        await until(lambda: last.is_over)
        assert isinstance(last.receiver.errors[0], ModelRemoved)


async def test_generated_texts_are_not_kept(folder, workers, caplog):
    async with Served(folder, response_cache_mb=1) as model:
        model.add(first := new_job())
        model.add(joined := new_job())  # before it is known what the model does
        await until(lambda: workers)
        workers[0].abilities = ["generate", "chat"]
        workers[0].load()
        await until(lambda: model.responses.is_off)
        assert "responseCacheMb has no effect" in caplog.text
        first.deliver([Part(first.id, b"a text")])
        await asyncio.sleep(0)
        assert workers[0].sent == [[first], [joined]]
        joined.deliver([Part(joined.id, b"another text")])
        model.add(last := new_job())
        assert workers[0].sent[-1] == [last]
        assert (model.responses.size_bytes, model.responses.counts["hit"]) == (0, 0)


async def test_a_job_that_moves_to_another_version_leaves_the_cache(folder, workers):
    (folder / "other").mkdir()
    (folder / "other" / "handler.py").touch()
    cached = {"response_cache_mb": 1}
    async with Served(folder, **cached) as model, Served(folder / "other", **cached) as default:
        job, same = new_job(), new_job()
        model.add(job)
        default.stand_in_for(model, job, lambda version: None)
        model.add(same)
        await until(lambda: len(workers) == 2)
        workers[1].load()
        workers[0].kill(CANNOT_LOAD)
        await until(lambda: [job] in workers[1].sent)
        job.deliver([Part(job.id, b"the other version's")])
        await until(lambda: same.is_over)
        assert same.receiver.errors  # its own version cannot answer
        await until(lambda: default.responses.size_bytes)
        assert model.responses.size_bytes == 0
