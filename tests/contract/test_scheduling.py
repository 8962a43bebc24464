"""Job tickets, priorities, time limits and asynchronous handlers."""

from __future__ import annotations

import json
import time

import pytest

from support.archives import pack_handler
from support.streams import Stream

NO_WORKER = 'Model "{}" has no worker to serve inference request.'
PRIORITY = "x-flambeau-priority"
TIMEOUT = "x-flambeau-timeout"


def serve(start, folder, handler="noting", **settings):
    settings = {"minWorkers": 1, "maxWorkers": 1, **settings}
    config = "".join(f"{key}: {value}\n" for key, value in settings.items())
    return start(pack_handler(folder, handler, config=config)).wait_ready()


class Noted:
    """A noting model: who was run, and a request that keeps its worker busy."""

    def __init__(self, server, folder):
        self.server, self.note, self.gate = server, folder / "note", folder / "gate"

    def ask(self, name, s=0.0, **headers):
        return self.server.predict("noting", {"name": name, "s": s, "note": str(self.note)}, headers=headers)

    def begin(self, name, s=0.0, until="", **headers):
        order = {"name": name, "s": s, "until": until, "note": str(self.note)}
        return self.server.at_once(
            lambda order: self.server.predict("noting", order, headers=headers, timeout=60), [order]
        )[0]

    def names(self):
        return self.note.read_text().split() if self.note.exists() else []

    def keep_busy(self, name="busy"):
        """A request that is run until `release`."""
        future = self.begin(name, until=str(self.gate))
        self.server.until(lambda: name in self.names())
        return future

    def release(self):
        self.gate.touch()

    def num_waiting(self):
        return self.server.describe("noting")["jobQueueStatus"]["pendingRequests"]


# ---- job tickets ----


def test_without_a_ticket_a_request_is_refused_at_once(start, tmp_path):
    noted = Noted(serve(start, tmp_path, useJobTicket="true"), tmp_path)
    assert noted.server.describe("noting")["useJobTicket"] is True
    busy = noted.keep_busy()
    refused = noted.ask("late")
    assert refused.status == 503
    assert refused.json["type"] == "ServiceUnavailableException"
    assert refused.json["message"].startswith(NO_WORKER.format("noting"))
    assert "useJobTicket" in refused.json["message"]
    noted.release()
    assert busy.result().status == 200
    assert noted.ask("again").status == 200
    assert noted.names() == ["busy", "again"]


def test_each_idle_worker_has_a_ticket(start, tmp_path):
    noted = Noted(serve(start, tmp_path, useJobTicket="true", minWorkers=2, maxWorkers=2), tmp_path)
    first = noted.keep_busy("first")
    second = noted.keep_busy("second")
    assert noted.ask("third").status == 503
    noted.release()
    assert [first.result().status, second.result().status] == [200, 200]


def test_batching_workers_do_not_use_up_each_others_tickets(start, tmp_path):
    # Batches leave when they are full, however long their requests take to arrive.
    settings = {"useJobTicket": "true", "minWorkers": 2, "maxWorkers": 2, "batchSize": 2, "maxBatchDelay": 60_000}
    noted = Noted(serve(start, tmp_path, **settings), tmp_path)
    for round in range(3):
        futures = [noted.begin(f"{round}-{i}", 0.1) for i in range(4)]
        assert [future.result().status for future in futures] == [200] * 4
    busy = [noted.begin(f"busy-{i}", until=str(noted.gate)) for i in range(4)]
    noted.server.until(lambda: len(noted.names()) == 16)
    assert noted.ask("late").status == 503
    noted.release()
    assert [future.result().status for future in busy] == [200] * 4
    last = [noted.begin(f"last-{i}") for i in range(2)]
    assert [future.result().status for future in last] == [200, 200]


def test_tickets_come_back_with_a_worker_that_died(start, tmp_path):
    server = serve(start, tmp_path, handler="faulty", useJobTicket="true")
    assert server.predict("faulty", {"do": "exit"}).status == 500
    server.until(lambda: server.predict("faulty", {"do": "answer"}).status == 200)


def test_clients_that_leave_keep_no_ticket(start, tmp_path):
    noted = Noted(serve(start, tmp_path, useJobTicket="true"), tmp_path)
    for i in range(5):
        leaving = Stream(noted.server, "noting", {"name": f"n{i}", "s": 0.05, "note": str(noted.note)})
        leaving.leave()
    noted.server.until(lambda: noted.ask("last").status == 200)


# ---- priorities ----


def test_high_priority_goes_before_normal_and_normal_before_low(start, tmp_path):
    noted = Noted(serve(start, tmp_path, minWorkers=2, maxWorkers=2), tmp_path)
    busy = [noted.keep_busy(f"busy-{i}") for i in range(2)]
    waiting = []
    for i, priority in enumerate(("low", "normal", "", "high", "low", "HIGH")):
        waiting.append(noted.begin(f"{priority or 'none'}-{i}", **({PRIORITY: priority} if priority else {})))
        noted.server.until(lambda i=i: noted.num_waiting() == i + 1)
    assert noted.server.manage("PUT", "/models/noting?min_worker=1&max_worker=1").status < 300
    noted.release()
    assert all(future.result().status == 200 for future in busy + waiting)
    assert noted.names()[2:] == ["high-3", "HIGH-5", "normal-1", "none-2", "low-0", "low-4"]


def test_unknown_priority_is_refused_with_the_remedy(start, tmp_path):
    noted = Noted(serve(start, tmp_path), tmp_path)
    refused = noted.ask("x", **{PRIORITY: "urgent"})
    assert (refused.status, refused.json["type"]) == (400, "BadRequestException")
    assert refused.json["message"] == "x-flambeau-priority is 'urgent'; write one of: high, normal, low"
    assert noted.names() == []


# ---- time limits ----


def test_request_past_its_client_timeout_is_answered_and_leaves_the_queue(start, tmp_path):
    noted = Noted(serve(start, tmp_path, minWorkers=2, maxWorkers=2, clientTimeoutInMills=400), tmp_path)
    futures = [noted.keep_busy(f"busy-{i}") for i in range(2)]
    waiting = noted.begin("late")
    reply = waiting.result()
    assert (reply.status, reply.json["type"]) == (408, "RequestTimeoutException")
    assert "clientTimeoutInMills" in reply.json["message"]
    assert [future.result().status for future in futures] == [408, 408]  # those that run are answered too
    noted.release()
    noted.server.until(lambda: noted.num_waiting() == 0)
    noted.server.until(lambda: noted.ask("after").status == 200)
    assert "late" not in noted.names()


def test_request_past_its_own_timeout_is_answered_and_leaves_the_queue(start, tmp_path):
    noted = Noted(serve(start, tmp_path), tmp_path)
    busy = noted.keep_busy()
    reply = noted.ask("late", **{TIMEOUT: "0.2"})
    assert (reply.status, reply.json["type"]) == (408, "RequestTimeoutException")
    assert "0.2 s (x-flambeau-timeout)" in reply.json["message"]
    noted.release()
    assert busy.result().status == 200
    assert noted.ask("in-time", **{TIMEOUT: "60"}).status == 200
    assert noted.ask("x", **{TIMEOUT: "soon"}).status == 400
    assert noted.names() == ["busy", "in-time"]


def test_client_that_goes_away_leaves_the_queue(start, tmp_path):
    noted = Noted(serve(start, tmp_path, minWorkers=2, maxWorkers=2), tmp_path)
    busy = [noted.keep_busy(f"busy-{i}") for i in range(2)]
    leaving = Stream(noted.server, "noting", {"name": "gone", "note": str(noted.note)})
    noted.server.until(lambda: noted.num_waiting() == 1)
    leaving.leave()
    noted.server.until(lambda: noted.num_waiting() == 0)
    noted.release()
    assert all(future.result().status == 200 for future in busy)
    assert noted.ask("after").status == 200
    assert "gone" not in noted.names()


def test_idle_workers_collect_at_the_same_time(start, tmp_path):
    noted = Noted(serve(start, tmp_path, minWorkers=2, maxWorkers=2, batchSize=2, maxBatchDelay=60_000), tmp_path)
    began = time.monotonic()
    futures = [noted.begin(f"n{i}", 1.0) for i in range(4)]
    assert [future.result().json["batch"] for future in futures] == [2] * 4
    assert time.monotonic() - began < 40  # nobody waited for a delay to pass, and two batches ran side by side


# ---- asynchronous handlers ----


def ask(server, **order):
    return server.predict("asynchronous", order)


def test_async_handler_runs_requests_side_by_side_and_answers_each_when_it_is_done(start, tmp_path):
    server = serve(start, tmp_path, handler="asynchronous", asyncCommunication="true", batchSize=8)
    slow = server.at_once(lambda s: ask(server, s=s, i=1), [1.5])
    server.until(lambda: ask(server, i=2).json["most"] >= 2)
    assert not slow[0].done()
    assert slow[0].result().json["i"] == 1
    assert server.logged("asyncCommunication", "batchSize 8")


def test_error_of_an_async_request_fails_no_other(start, tmp_path):
    server = serve(start, tmp_path, handler="asynchronous", asyncCommunication="true")
    good = server.at_once(lambda i: ask(server, s=0.8, i=i), [*range(4)])
    bad = server.at_once(lambda i: server.predict("asynchronous", {"s": 0.1, "raise": True}), [*range(3)])
    assert [r.result().status for r in bad] == [503] * 3
    assert all(r.result().json["message"].startswith("Prediction failed: ") for r in bad)
    assert [future.result().json["i"] for future in good] == [*range(4)]
    ids = {future.result().json["id"] for future in good}
    assert len(ids) == 4


def test_async_request_has_a_response_timeout_of_its_own(start, tmp_path):
    server = serve(start, tmp_path, handler="asynchronous", asyncCommunication="true", responseTimeout=1)
    reply = ask(server, s=60)
    assert (reply.status, reply.json["message"].startswith("Worker died: ")) == (500, True)
    assert ask(server, i=1).status == 200


def test_async_request_that_hangs_costs_its_neighbors_nothing(start, tmp_path):
    server = serve(start, tmp_path, handler="asynchronous", asyncCommunication="true", responseTimeout=3)
    hanging = server.at_once(lambda s: ask(server, s=s), [60])
    server.until(lambda: ask(server).json["most"] >= 2)
    time.sleep(1.5)  # so that the time limit of the neighbor passes later than that of the request that hangs
    neighbor = server.at_once(lambda i: ask(server, s=2.5, i=i), [7])
    assert hanging[0].result().status == 500
    assert neighbor[0].result().json["i"] == 7
    assert server.describe("asynchronous")["workers"][0]["restarts"] == 1


def test_async_calls_get_a_context_of_their_own(start, tmp_path):
    (tmp_path / "keeping.py").write_text(
        "import threading\n"
        "class Keeping:\n"
        "    def initialize(self, context):\n"
        "        context.cache = {'seen': []}\n"
        "        context.lock = threading.Lock()\n"
        "    async def handle(self, data, context):\n"
        "        context.cache['seen'].append(1)\n"
        "        assert context.lock is not None\n"
        "        return [{'seen': len(context.cache['seen']), 'size': context.system_properties['batch_size']}]\n"
    )
    (tmp_path / "model-config.yaml").write_text("asyncCommunication: true\nminWorkers: 1\nmaxWorkers: 1\n")
    from flambeau.archive.pack import Recipe, pack

    recipe = Recipe(
        model_name="keeping", handler=str(tmp_path / "keeping.py"), config_file=tmp_path / "model-config.yaml"
    )
    server = start(pack(recipe, tmp_path)).wait_ready()
    assert [server.predict("keeping").json for _ in range(3)] == [{"seen": 1, "size": 1}] * 3


def test_plain_handler_is_called_for_one_request_at_a_time(start, tmp_path):
    noted = Noted(serve(start, tmp_path, asyncCommunication="true", batchSize=4), tmp_path)
    futures = [noted.begin(f"n{i}", 0.05) for i in range(4)]
    assert [future.result().json["batch"] for future in futures] == [1] * 4
    assert noted.server.logged("asyncCommunication", "async def handle")


@pytest.mark.parametrize("setting", ["sequenceBatching", "continuousBatching"])
def test_async_handler_of_a_model_whose_requests_depend_on_each_other_is_run_to_its_end(start, tmp_path, setting):
    settings = {setting: "true", "sequenceMaxIdleMSec": 60_000, "maxNumSequence": 4, "maxSequenceJobQueueSize": 8}
    server = serve(start, tmp_path, handler="asynchronous", **settings)
    futures = server.at_once(
        lambda i: server.predict("asynchronous", {"s": 0.01, "i": i}, headers={"ts_request_sequence_id": "a"}),
        [*range(4)],
    )
    replies = [future.result().json for future in futures]
    assert sorted(reply["i"] for reply in replies) == [*range(4)]
    assert {reply["most"] for reply in replies} == {1}


def test_model_whose_workers_are_given_up_refuses_instead_of_waiting(start, tmp_path):
    server = start(pack_handler(tmp_path, "broken", config="minWorkers: 1\nmaxWorkers: 1\nmaxRetryTimeoutInSec: 1\n"))
    server.wait_started()
    server.until(lambda: server.describe("broken")["workers"][0]["state"] == "failed")
    refused = server.predict("broken", {})
    assert refused.status == 503
    assert refused.json["message"].startswith(NO_WORKER.format("broken"))
    assert json.loads(refused.body)["code"] == 503
