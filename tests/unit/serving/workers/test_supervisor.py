from __future__ import annotations

import asyncio
import time

import pytest

from flambeau.errors import WorkersFailed
from flambeau.serving.workers.placement import next_device
from flambeau.serving.workers.recovery import Death
from flambeau.serving.workers.supervisor import Slot, Supervisor

CRASH = Death(reason="exited with code 1", exit_code=1)
FINAL = Death(reason="the model could not be loaded: there is no tokenizer", while_loading=True, is_final=True)


class Worker:
    """Lives as long as it is told, then ends as it is told."""

    def __init__(self, loads: bool, death: Death = CRASH) -> None:
        self.ready = asyncio.get_running_loop().create_future()
        self.ended = asyncio.get_running_loop().create_future()
        self.started_at = time.time()
        self.ready_at = None
        self.has_answered = False
        self.is_ready = False
        self._loads = loads
        self._death = death

    async def run(self):
        if self._loads:
            self.is_ready, self.ready_at = True, time.monotonic()
            self.ready.set_result(None)
            return await self.ended
        self.ready.cancel()
        return self._death

    async def retire(self, timeout_s):
        self.ended.set_result(Death(reason="retired"))


def new_supervisor(slots, *, loads=True, max_retry_s=300, death=CRASH):
    workers = []

    def new_slot():
        return Slot(
            len(slots), (next_device(range(4), [slot.device for slot in supervisor.slots]),), f"W-{len(slots)}-m"
        )

    def new_worker(slot):
        slots.append(slot)
        return Worker(loads, death)

    supervisor = Supervisor(
        name="m",
        new_worker=new_worker,
        new_slot=new_slot,
        workers=workers,
        startup_timeout_s=10,
        max_retry_s=max_retry_s,
        drain_timeout_s=1,
        on_change=lambda: None,
    )
    return supervisor


def test_workers_of_one_call_are_spread_over_the_devices():
    async def scale():
        supervisor = new_supervisor([])
        fresh = supervisor.scale(4, 4)
        await supervisor.wait_started(fresh)
        devices = [slot.device for slot in supervisor.slots]
        await supervisor.close()
        return devices

    assert asyncio.run(scale()) == [0, 1, 2, 3]


def test_scaling_down_retires_the_newest():
    async def scale():
        supervisor = new_supervisor([])
        await supervisor.wait_started(supervisor.scale(3, 3))
        first = supervisor.slots[0]
        supervisor.scale(1, 1)
        kept = [*supervisor.slots]
        await supervisor.close()
        return kept == [first]

    assert asyncio.run(scale())


def test_log_tells_the_states_of_a_worker_in_words_that_people_look_for(caplog):
    async def live():
        supervisor = new_supervisor([])
        await supervisor.wait_started(supervisor.scale(1, 1))
        worker = supervisor.slots[0].worker
        worker.ended.set_result(CRASH)
        async with asyncio.timeout(30):
            while not (supervisor.has_ready and supervisor.slots[0].worker is not worker):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        await supervisor.close()

    with caplog.at_level("INFO"):
        asyncio.run(live())
    texts = [record.getMessage() for record in caplog.records]
    assert [text for text in texts if "State change" in text] == [
        "W-0-m State change null -> WORKER_STARTED",
        "W-0-m State change WORKER_STARTED -> WORKER_MODEL_LOADED",
        "W-0-m State change WORKER_MODEL_LOADED -> WORKER_STOPPED",
        "W-0-m State change WORKER_STOPPED -> WORKER_STARTED",
        "W-0-m State change WORKER_STARTED -> WORKER_MODEL_LOADED",
        "W-0-m State change WORKER_MODEL_LOADED -> WORKER_SCALED_DOWN",
    ]
    assert "0 Worker disconnected. WORKER_MODEL_LOADED" in texts
    assert "Retry worker: 0 in 0 seconds." in texts
    assert any(text.startswith("Auto recovery start timestamp: ") for text in texts)
    assert "Auto recovery succeeded, reset recoveryStartTS" in texts
    assert "Auto recovery failed again" not in texts


def test_recovery_that_fails_again_says_so(caplog):
    async def fail():
        supervisor = new_supervisor([], loads=False, max_retry_s=0.0)
        supervisor.scale(1, 1)
        async with asyncio.timeout(30):
            while supervisor.has_hope:
                await asyncio.sleep(0.01)
        await supervisor.close()

    with caplog.at_level("INFO"):
        asyncio.run(fail())
    assert "Auto recovery failed again" in caplog.text


def test_slot_that_cannot_load_is_given_up_in_time_and_revived_by_scaling():
    async def fail():
        supervisor = new_supervisor([], loads=False, max_retry_s=0.0)
        supervisor.scale(1, 1)
        async with asyncio.timeout(30):
            while supervisor.has_hope:
                await asyncio.sleep(0.01)
        died = supervisor.last_death
        supervisor.scale(1, 1)
        revived = supervisor.has_hope
        await supervisor.close()
        return died, revived

    died, revived = asyncio.run(fail())
    assert died == CRASH
    assert revived


def test_model_that_could_be_loaded_is_never_given_up_for_later_crashes():
    slot = Slot(1)
    Supervisor._take_note(slot, CRASH, was_ready=False, was_useful=False)
    slot.waited_s = 1000
    Supervisor._take_note(slot, CRASH, was_ready=True, was_useful=False)
    assert slot.waited_s == 0
    assert slot.failures == 2  # back-off goes on


def test_worker_that_answered_anything_ends_the_back_off():
    slot = Slot(1)
    for _ in range(5):
        Supervisor._take_note(slot, CRASH, was_ready=True, was_useful=False)
    Supervisor._take_note(slot, CRASH, was_ready=True, was_useful=True)
    assert slot.failures == 1


@pytest.mark.parametrize("kind", [OSError, RuntimeError, KeyError])
def test_worker_that_cannot_even_be_made_is_a_failure_like_others(kind):
    async def fail():
        supervisor = new_supervisor([])

        def new_worker(slot):
            raise kind("no port is free")

        supervisor._new_worker = new_worker
        fresh = supervisor.scale(1, 1)
        with pytest.raises(WorkersFailed) as caught:
            await supervisor.wait_started(fresh)
        await supervisor.close()
        return caught.value.cause

    assert asyncio.run(fail()) == f"it could not be started: {kind('no port is free')}"


def test_task_that_fails_is_in_the_log(caplog):
    async def fail():
        supervisor = new_supervisor([])

        async def stumble():
            raise RuntimeError("a mistake of ours")

        supervisor._own(stumble())
        await supervisor.close()

    asyncio.run(fail())
    assert "a mistake of ours" in caplog.text


def test_restarts_are_not_forgotten_with_their_slots():
    async def live():
        supervisor = new_supervisor([])
        await supervisor.wait_started(supervisor.scale(1, 1))
        worker = supervisor.slots[0].worker
        worker.ended.set_result(CRASH)
        async with asyncio.timeout(30):
            while not (supervisor.has_ready and supervisor.slots[0].worker is not worker):
                await asyncio.sleep(0.01)
        supervisor.scale(0, 0)
        await supervisor.close()
        return supervisor.num_restarts

    assert asyncio.run(live()) == 1


def test_load_that_cannot_succeed_is_tried_once_and_told_in_one_line(caplog):
    caplog.set_level("INFO")

    async def fail():
        supervisor = new_supervisor(lives := [], loads=False, death=FINAL)
        fresh = supervisor.scale(3, 3)
        with pytest.raises(WorkersFailed) as caught:
            await supervisor.wait_started(fresh)
        await asyncio.gather(*(slot.task for slot in fresh))
        assert supervisor.has_failed_for_good
        assert not supervisor.has_hope
        assert len(lives) == 3
        assert [slot.task for slot in supervisor.scale(1, 1)]  # who scales it has mended it, or thinks so
        await asyncio.gather(*(slot.task for slot in supervisor.slots))
        await supervisor.close()
        return caught.value, len(lives)

    error, num_lives = asyncio.run(fail())
    assert (error.cause, error.is_final, num_lives) == (FINAL.reason, True, 4)
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    text = f"Backend worker error: worker {{}} of m is not tried again: {FINAL.reason}"
    assert told == [text.format(0), text.format(3)]  # once for each time it was scaled
    assert "Retry worker" not in caplog.text
    assert "Auto recovery" not in caplog.text


def with_lives(*lives):
    """A supervisor whose workers end like this, one after the other; None: it loads."""
    supervisor, left = new_supervisor([]), [*lives]

    def new_worker(slot):
        death = left.pop(0)
        return Worker(loads=death is None, death=death)

    supervisor._new_worker = new_worker
    return supervisor


def test_model_that_was_loaded_before_is_tried_again_whatever_the_cause(caplog):
    async def live():
        supervisor = with_lives(None, FINAL, None)
        await supervisor.wait_started(supervisor.scale(1, 1))
        [slot] = supervisor.slots
        slot.worker.ended.set_result(CRASH)
        async with asyncio.timeout(30):
            while not (slot.restarts == 2 and slot.is_ready):
                await asyncio.sleep(0.01)
        assert slot.last_death.reason == FINAL.reason
        assert not supervisor.has_failed_for_good
        await supervisor.close()

    asyncio.run(live())
    assert "is not tried again" not in caplog.text


def test_waiting_for_a_decision_goes_on_until_all_are_given_up():
    async def fail():
        supervisor = with_lives(CRASH, CRASH, FINAL)
        supervisor.scale(1, 1)
        async with asyncio.timeout(30):
            with pytest.raises(WorkersFailed) as caught:
                await supervisor.wait_decided()
        await supervisor.close()
        return caught.value

    error = asyncio.run(fail())
    assert (error.cause, error.is_final) == (FINAL.reason, True)


@pytest.mark.parametrize("lives", [[None], [CRASH, None]])
def test_waiting_for_a_decision_ends_when_a_worker_has_the_model(lives):
    async def live():
        supervisor = with_lives(*lives)
        supervisor.scale(1, 1)
        async with asyncio.timeout(30):
            await supervisor.wait_decided()
        await supervisor.close()

    asyncio.run(live())
