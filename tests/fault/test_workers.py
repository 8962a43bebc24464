"""Workers that crash, hang, eat memory or answer nonsense: the right client is told why, nobody else notices."""

from __future__ import annotations

import os
import signal
import time

import pytest

from support.held_requests import HeldRequests
from support.running import HANDLERS, Load, RunningServer, children_of, is_running

GROUP = "parallelType: pp\ndeviceType: cpu\nminWorkers: 1\nmaxWorkers: 1\ntorchrun:\n    nproc-per-node: 2\n"


def order(do, **more):
    return {"do": do, **more}


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory):
    """One server for the tests whose worker lives on."""
    server = RunningServer(tmp_path_factory.mktemp("unharmed") / "server.log", str(HANDLERS / "faulty.py")).wait_ready()
    yield server
    assert server.describe("faulty")["workers"][0]["restarts"] == 0
    assert server.stop(timeout=40) == 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (order("exit", code=3), "exited with code 3"),
        (order("segfault"), "killed by SIGSEGV (signal 11)"),
        (order("sys exit"), "exited with code 5"),
        (order("half frame"), "exited with code 4"),
        (order("bad frame"), "malformed frame"),
    ],
)
def test_crash_is_answered_with_its_cause_and_the_worker_comes_back(start, fault, reason):
    server = start("faulty.py").wait_ready()
    reply = server.predict("faulty", fault)
    assert reply.status == 500
    assert reply.message.startswith("Worker died: ")
    assert reason in reply.cause
    assert server.predict("faulty", order("answer")).status == 200
    worker = server.describe("faulty")["workers"][0]
    assert worker["restarts"] == 1
    assert reason in worker["lastFailure"]["reason"]


def test_last_words_of_a_worker_are_part_of_the_cause(start):
    server = start("faulty.py").wait_ready()
    assert "about to exit" in server.predict("faulty", order("exit")).cause
    assert "about to exit" in server.predict("faulty", order("exit", code=8)).cause  # on stdout, this one
    segfault = server.predict("faulty", order("segfault"))
    assert "Fatal Python error: Segmentation fault" in segfault.cause


def test_cause_stays_inside_when_details_are_off(start):
    server = start("faulty.py", "--no-error-details").wait_ready()
    reply = server.predict("faulty", order("exit"))
    assert reply.json.keys() == {"code", "type", "message"}
    assert reply.message.startswith("Worker died: exited with code ")
    reply = server.predict("faulty", order("raise"))
    assert reply.json.keys() == {"code", "type", "message"}
    assert reply.message.startswith("Prediction failed: ")
    assert "secret" not in reply.message
    assert "the secret is 42" in server.log


def test_kill_9_under_load_loses_no_request(start):
    server = start("faulty.py", "--workers", "2", "--job-queue-size", "1000").wait_ready()
    with Load(lambda: server.predict("faulty", order("sleep", s=0.005)), threads=8) as load:
        for _ in range(3):
            # Both are back, so nobody waits any more who has seen a worker die: a second death would end that job.
            server.until(lambda: len(server.worker_pids("faulty")) == 2)
            seen = len(load.replies)
            server.until(lambda seen=seen: len(load.replies) > seen + 30)
            os.kill(server.worker_pids("faulty")[0], signal.SIGKILL)
        seen = len(load.replies)
        server.until(lambda: len(load.replies) > seen + 30)
    assert not load.errors
    assert {reply.status for reply in load.replies} == {200}
    assert len(load.replies) > 100


def test_job_that_kills_workers_is_found_and_its_neighbors_are_answered(start):
    server = start("faulty.py", "--batch-size", "6", "--max-batch-delay", "300").wait_ready()
    orders = [order("answer", value=i) for i in range(6)]
    orders[3] = order("exit", code=7)
    replies = [future.result() for future in server.at_once(lambda o: server.predict("faulty", o), orders)]
    assert [reply.status for reply in replies] == [200, 200, 200, 500, 200, 200]
    assert [reply.json["value"] for reply in replies if reply.status == 200] == [0, 1, 2, 4, 5]
    assert "exited with code 7" in replies[3].cause
    assert server.describe("faulty")["workers"][0]["restarts"] == 2


def test_job_whose_worker_is_killed_from_outside_is_tried_four_times_at_most(start):
    server = start("faulty.py").wait_ready()
    reply = server.predict("faulty", order("kill"))
    assert reply.status == 500
    assert "SIGKILL" in reply.cause
    assert server.describe("faulty")["workers"][0]["restarts"] == 4


def test_worker_that_hangs_is_replaced_and_its_client_gets_an_error(start):
    server = start("faulty.py", "--response-timeout", "1").wait_ready()
    reply = server.predict("faulty", order("hang"))
    assert reply.status == 500
    assert "no answer within responseTimeout, 1 s" in reply.cause
    assert server.predict("faulty", order("answer")).status == 200


def test_neighbors_of_a_hanging_job_are_answered(start):
    server = start("faulty.py", "--response-timeout", "1", "--batch-size", "3", "--max-batch-delay", "300").wait_ready()
    orders = [order("answer", value=1), order("hang"), order("answer", value=3)]
    replies = [future.result() for future in server.at_once(lambda o: server.predict("faulty", o), orders)]
    assert [reply.status for reply in replies] == [200, 500, 200]


def test_jobs_do_not_wait_behind_a_stuck_one_while_another_worker_is_idle(start, tmp_path):
    server = start("faulty.py", "--workers", "2").wait_ready()
    for _ in range(200):  # let the server learn that this model is quick
        server.predict("faulty", order("answer"))
    held = HeldRequests(server, tmp_path)
    orders = [order("answer", value=i) for i in range(12)]
    futures = server.at_once(lambda o: server.predict("faulty", o), orders)
    assert all(future.result().status == 200 for future in futures)
    assert [reply.status for reply in held.release()] == [200]


def test_job_that_kills_an_async_worker_is_found_among_those_it_ran_beside(start):
    server = start("asynchronous.py").wait_ready()
    orders = [{"s": 0.3, "i": i, "exit": i == 4} for i in range(8)]
    replies = [future.result() for future in server.at_once(lambda o: server.predict("asynchronous", o), orders)]
    assert [reply.status for reply in replies] == [200] * 4 + [500] + [200] * 3
    assert "exited with code 6" in replies[4].cause
    server.until(lambda: server.describe("asynchronous")["workers"][0]["restarts"] == 2)  # the next one is on its way


def test_request_that_ends_workers_is_refused_while_others_are_answered(start, tmp_path):
    from support.archives import pack_handler

    config = "quarantineAfterCrashes: 2\nminWorkers: 1\nmaxWorkers: 1\n"
    server = start(pack_handler(tmp_path, "faulty", config=config)).wait_ready()
    for _ in range(2):
        assert server.predict("faulty", order("exit", code=3)).status == 500
        server.until(lambda: server.predict("faulty", order("answer")).status == 200)
    refused = server.predict("faulty", order("exit", code=3))
    assert (refused.status, refused.json["type"]) == (422, "BadRequestException")
    assert "quarantineAfterCrashes" in refused.message
    assert "exited with code 3" in refused.cause
    assert server.predict("faulty", order("exit", code=4)).status == 500  # another request
    assert server.describe("faulty")["workers"][0]["restarts"] == 3


def test_worker_over_its_memory_limit_is_stopped(start, tmp_path):
    from support.archives import pack_handler

    model = pack_handler(tmp_path, "faulty", config="workerMemoryLimitMb: 200\nminWorkers: 1\nmaxWorkers: 1\n")
    server = start(model).wait_ready()
    reply = server.predict("faulty", order("eat"))
    assert reply.status == 507
    assert "workerMemoryLimitMb is 200" in reply.cause
    assert server.predict("faulty", order("answer")).status == 200


def test_memory_of_children_counts(start, tmp_path):
    from support.archives import pack_handler

    model = pack_handler(tmp_path, "faulty", config="workerMemoryLimitMb: 200\nminWorkers: 1\nmaxWorkers: 1\n")
    server = start(model).wait_ready()
    reply = server.predict("faulty", order("let a child eat"))
    assert reply.status == 507
    assert "with its children; workerMemoryLimitMb is 200" in reply.cause
    assert server.predict("faulty", order("answer")).status == 200


def test_too_many_workers_are_refused_with_the_limit(unharmed):
    reply = unharmed.manage("PUT", "/models/faulty?min_worker=1&max_worker=1001")
    assert (reply.status, reply.json["type"]) == (400, "BadRequestException")
    assert reply.message == "max_worker is 1001; a model may have at most 1000 workers (max_workers_per_model)"
    assert len(unharmed.describe("faulty")["workers"]) == 1


def test_memory_error_is_out_of_resources(unharmed):
    reply = unharmed.predict("faulty", order("memory error"))
    assert (reply.status, reply.message.partition(":")[0]) == (507, "Out of resources")
    assert unharmed.describe("faulty")["workers"][0]["restarts"] == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (order("raise"), "Prediction failed"),
        (order("no json"), "Unsupported model output data type."),
        (order("odd text"), "Prediction failed"),
        (order("long text"), "Prediction failed"),
        (order("count"), "number of batch response mismatched"),
    ],
)
def test_wrong_answer_is_an_error_and_the_worker_lives_on(unharmed, fault, message):
    pid = unharmed.predict("faulty", order("answer")).json["pid"]
    reply = unharmed.predict("faulty", fault)
    assert (reply.status, reply.json["type"]) == (503, "InternalServerException")
    assert reply.message.startswith(message.rstrip("."))
    assert unharmed.predict("faulty", order("answer")).json["pid"] == pid


def test_status_given_as_text_is_understood(unharmed):
    reply = unharmed.predict("faulty", order("status as text"))
    assert (reply.status, reply.body) == (418, b"odd")


def test_answer_over_the_limit_names_the_limit_and_spares_the_worker(start):
    server = start("faulty.py", "--max-response-size", "100000").wait_ready()
    pid = server.predict("faulty", order("answer")).json["pid"]
    reply = server.predict("faulty", order("huge", bytes=100_001))
    assert reply.status == 503
    assert "max_response_size" in reply.message
    assert server.predict("faulty", order("huge", bytes=100_000)).status == 200
    assert server.predict("faulty", order("answer")).json["pid"] == pid


def test_ten_megabytes_of_prints_delay_no_request(start):
    server = start("faulty.py", "--workers", "2").wait_ready()
    began = time.monotonic()
    futures = server.at_once(lambda o: server.predict("faulty", o), [order("print", mb=10)])
    slowest_s = 0.0
    while not futures[0].done():
        asked = time.monotonic()
        assert server.request("GET", "/livez").status == 200
        slowest_s = max(slowest_s, time.monotonic() - asked)
    assert futures[0].result().body == b"printed"
    assert slowest_s < 1 + (time.monotonic() - began) / 2  # on a slow machine everything takes its time


def test_junk_on_stdout_stays_in_the_log(start):
    server = start("faulty.py").wait_ready()
    assert server.predict("faulty", order("junk")).body == b"junked"
    assert server.predict("faulty", order("answer")).status == 200
    server.predict("faulty", order("exit"))  # the junk has no end of line: it is logged with the last of the output
    server.until(lambda: "junk without end" in server.log and "more junk" in server.log)


def test_json_nested_without_end_reaches_the_handler_as_bytes(start):
    server = start("echo.py").wait_ready()
    for body in (b"[" * 5_000, b"[" * 100_000 + b"]" * 100_000):
        reply = server.predict("echo", body, kind="application/json")
        assert reply.json["row"]["body"] == ["bytearray", body.decode()]
    assert server.describe("echo")["workers"][0]["restarts"] == 0


def test_children_of_a_worker_go_with_it(start, tmp_path):
    server = start("faulty.py").wait_ready()
    note = tmp_path / "child"
    assert server.predict("faulty", order("child", note=str(note))).status == 500
    server.until(lambda: not is_running(int(note.read_text())))


def test_scaling_to_zero_between_two_lives_answers_who_waits(start):
    server = start("broken.py").wait_started()
    server.until(lambda: server.describe("broken")["workers"][0]["restarts"] >= 3)  # now it waits longer
    waiting = server.at_once(lambda body: server.predict("broken", body), [{}])
    server.until(lambda: waiting[0].done() or server.describe("broken")["jobQueueStatus"]["pendingRequests"])
    assert server.manage("PUT", "/models/broken?min_worker=0").status == 202
    assert waiting[0].result().status == 503


def test_worker_that_cannot_start_is_shown_in_readiness_and_describe(start):
    server = start("broken.py").wait_started()
    ready = server.request("GET", "/readyz")
    assert ready.status == 503
    assert "a_database_that_nobody_has" in str(ready.json)
    server.until(lambda: server.describe("broken")["workers"][0].get("lastFailure"))
    assert "a_database_that_nobody_has" in str(server.describe("broken")["workers"][0]["lastFailure"])
    assert "retry-after" in server.predict("broken", {}).headers
    assert server.request("GET", "/livez").status == 200


def test_worker_that_never_starts_is_given_up_and_requests_are_refused_with_the_cause(start, tmp_path):
    from support.archives import pack_handler

    model = pack_handler(tmp_path, "broken", config="maxRetryTimeoutInSec: 1\nminWorkers: 1\nmaxWorkers: 1\n")
    server = start(model).wait_started()
    waiting = server.at_once(lambda body: server.predict("broken", body), [{}])
    server.until(lambda: server.request("GET", "/ping").status == 500)
    assert waiting[0].result().status == 503
    reply = server.predict("broken", {})
    assert reply.status == 503
    assert "has no worker to serve inference request" in reply.message
    assert "a_database_that_nobody_has" in reply.message


def test_failure_that_repeats_is_logged_in_full_once(start):
    server = start("broken.py").wait_started()
    server.until(lambda: server.logged("as before (attempt 3)", "a_database_that_nobody_has", level="WARNING"))
    assert server.log.count("raise ConnectionError(") == 1  # the last line of the traceback


def test_syntax_error_in_a_handler_is_final(start, tmp_path):
    (tmp_path / "odd.py").write_text("def handle(data, context:\n    return data\n")
    server = start(tmp_path / "odd.py").wait_started()
    server.until(lambda: server.describe("odd")["workers"][0]["state"] == "failed")
    worker = server.describe("odd")["workers"][0]
    assert (worker["restarts"], worker["pid"]) == (1, 0)
    assert "SyntaxError: " in worker["lastFailure"]["reason"]
    assert "(odd.py:1, column" in server.predict("odd", {}).message


def test_scaling_down_keeps_the_ready_worker_and_synchronous_waits_for_one(start, tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    server = start("slow_start.py", "--workers", "2", env={"SLOW_START_S": "0", "SLOW_START_UNTIL": str(gate)})
    server.wait_ready()
    first, second = server.worker_pids("slow_start")
    gate.unlink()  # a worker that restarts now does not become ready
    os.kill(first, signal.SIGKILL)
    server.until(lambda: server.worker_pids("slow_start") == [second])
    assert server.manage("PUT", "/models/slow_start?min_worker=1&max_worker=1&synchronous=true").status == 200
    assert server.worker_pids("slow_start") == [second]
    os.kill(second, signal.SIGKILL)
    server.until(lambda: server.worker_pids("slow_start") == [])
    scale = "/models/slow_start?min_worker=1&max_worker=1&synchronous=true"
    (waiting,) = server.at_once(lambda path: server.manage("PUT", path), [scale])
    server.until(lambda: server.describe("slow_start")["workers"][0]["state"] == "loading")
    assert not waiting.done()
    gate.touch()
    assert waiting.result().status == 200
    assert len(server.worker_pids("slow_start")) == 1


def test_start_that_takes_too_long_is_stopped(start):
    server = start("slow_start.py", "--startup-timeout", "0.5", env={"SLOW_START_S": "60"}).wait_started()
    assert "startupTimeout" in str(server.request("GET", "/readyz").json)


def test_requests_wait_while_the_model_loads(start, tmp_path):
    gate = tmp_path / "gate"
    server = start("slow_start.py", env={"SLOW_START_S": "0", "SLOW_START_UNTIL": str(gate)}).wait_listening()
    server.until(lambda: server.manage("GET", "/models/slow_start").status == 200)
    assert server.request("GET", "/startupz").status == 503
    assert server.request("GET", "/readyz").status == 503
    assert server.request("GET", "/ping").status == 200
    waiting = server.at_once(lambda body: server.predict("slow_start", body), [{}])
    server.until(lambda: server.describe("slow_start")["jobQueueStatus"]["pendingRequests"])
    gate.touch()
    assert waiting[0].result().body == b"at last"
    server.until(lambda: server.request("GET", "/readyz").status == 200)


def test_workers_die_with_their_server(start, tmp_path):
    server = start("faulty.py").wait_ready()
    pid = server.worker_pids("faulty")[0]
    HeldRequests(server, tmp_path).wait_running()
    server.process.kill()
    server.process.wait()
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


def kill_server(server):
    server.process.kill()
    server.process.wait()


def wait_gone(*pids):
    deadline = time.monotonic() + 20
    while (alive := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert alive == [], "they outlive their server"


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("state", ["idle", "keeps the lock", "stopped"])
def test_worker_and_its_children_die_with_a_killed_server(start, tmp_path, state, transport):
    server = start("faulty.py", "--worker-transport", transport).wait_ready()
    family = server.predict("faulty", order("keep child")).json
    if state == "keeps the lock":
        note = tmp_path / "note"
        server.at_once(lambda o: server.predict("faulty", o), [order("keep the lock", note=str(note))])
        server.until(note.exists)
    elif state == "stopped":
        os.kill(family["pid"], signal.SIGSTOP)
        os.kill(family["child"], signal.SIGSTOP)
    kill_server(server)
    wait_gone(family["pid"], family["child"])


def test_worker_dies_with_a_killed_server_also_without_the_reaper(start):
    server = start("faulty.py").wait_ready()
    worker = server.worker_pids("faulty")[0]
    os.kill(worker, signal.SIGSTOP)
    (reaper,) = [pid for pid in children_of(server.process.pid) if pid != worker]
    os.kill(reaper, signal.SIGKILL)
    kill_server(server)
    wait_gone(worker)


def test_reaper_is_replaced_and_ends_with_the_server(start):
    server = start("faulty.py").wait_ready()
    worker = server.worker_pids("faulty")[0]
    (killed,) = [pid for pid in children_of(server.process.pid) if pid != worker]
    os.kill(killed, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    server.until(lambda: server.worker_pids("faulty") not in ([], [worker]))
    (worker,) = server.worker_pids("faulty")
    server.until(lambda: len({*children_of(server.process.pid)} - {worker, killed}) == 1)
    (reaper,) = [pid for pid in children_of(server.process.pid) if pid != worker]
    child = server.predict("faulty", order("keep child")).json["child"]
    kill_server(server)
    wait_gone(worker, child, reaper)


def test_every_rank_of_a_group_dies_with_a_killed_server(start, tmp_path):
    from support.archives import pack_handler

    model = pack_handler(tmp_path, "echo", config=GROUP)
    server = start(model).wait_ready()
    ranks = [rank["pid"] for rank in server.describe("echo")["workers"][0]["ranks"]]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    kill_server(server)
    wait_gone(*ranks)
