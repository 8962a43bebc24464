"""Models grow with their queue, shrink when there is little to do, fall asleep and wake up."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from support.archives import pack_handler
from support.running import Load

ELASTIC = "minWorkers: 1\nmaxWorkers: 3\nidleTimeoutInSec: 1\ntargetQueueTimeInMills: 20\n"
SLEEPY = "minWorkers: 1\nmaxWorkers: 1\nidleTimeoutInSec: 0.3\nscaleToZero: true\n"


def serve(start, tmp_path, config, **options):
    return start(pack_handler(tmp_path, "napper", config=config), **options)


def num_ready(server):
    return len(server.worker_pids("napper"))


def state(server):
    return server.describe("napper")["state"]


def test_workers_are_added_while_jobs_wait_and_go_when_they_are_not_needed(start, tmp_path):
    server = serve(start, tmp_path, ELASTIC).wait_ready()
    first = server.worker_pids("napper")
    with Load(lambda: server.predict("napper", {"sleep_s": 0.1}), threads=8) as load:
        server.until(lambda: num_ready(server) == 3)
        seen = len(load.replies)
        server.until(lambda: len(load.replies) > seen + 30)
        assert len(server.describe("napper")["workers"]) <= 3  # and no more
    assert [reply.status for reply in load.replies if reply.status != 200] == load.errors == []
    server.until(lambda: num_ready(server) == len(server.describe("napper")["workers"]) == 1)
    assert server.worker_pids("napper") == first
    assert server.logged("napper", "2 workers", level="INFO")
    described = server.describe("napper")
    assert (described["minWorkers"], described["maxWorkers"]) == (1, 3)


def test_nothing_is_lost_when_workers_come_and_go(start, tmp_path):
    server = serve(start, tmp_path, ELASTIC.replace("InSec: 1", "InSec: 0.3")).wait_ready()
    for _ in range(3):
        with Load(lambda: server.predict("napper", {"sleep_s": 0.05}), threads=8) as load:
            server.until(lambda: num_ready(server) > 1)
        assert [reply.status for reply in load.replies if reply.status != 200] == load.errors == []
        server.until(lambda: len(server.describe("napper")["workers"]) == 1)


def test_number_asked_for_over_the_api_counts(start, tmp_path):
    server = serve(start, tmp_path, ELASTIC).wait_ready()
    assert server.manage("PUT", "/models/napper?min_worker=2&synchronous=true").status == 200
    with Load(lambda: server.predict("napper", {"sleep_s": 0.05}), threads=8) as load:
        server.until(lambda: len(load.replies) > 100)
        assert num_ready(server) == 2  # max_worker is min_worker, unless it is given
    assert len(server.describe("napper")["workers"]) == 2


def test_equal_limits_leave_the_number_alone(start, tmp_path):
    server = serve(start, tmp_path, "minWorkers: 1\nmaxWorkers: 1\nidleTimeoutInSec: 0.1\n").wait_ready()
    pids = server.worker_pids("napper")
    with Load(lambda: server.predict("napper", {"sleep_s": 0.05}), threads=4) as load:
        server.until(lambda: len(load.replies) > 40)
    assert server.worker_pids("napper") == pids
    assert "state" not in server.describe("napper")


def test_model_that_could_not_load_again_does_not_grow(start, tmp_path):
    trouble = tmp_path / "trouble"
    server = serve(start, tmp_path, ELASTIC, env={"NAPPER_FAILS_WHILE": str(trouble)}).wait_ready()
    trouble.touch()
    with Load(lambda: server.predict("napper", {"sleep_s": 0.1}), threads=6) as load:
        server.until(lambda: any("lastFailure" in worker for worker in server.describe("napper")["workers"]))
        seen = len(load.replies)
        server.until(lambda: len(load.replies) > seen + 20)
        assert len(server.describe("napper")["workers"]) == 2
    assert {reply.status for reply in load.replies} == {200}  # the one that could load goes on
    trouble.unlink()


def test_model_without_requests_sleeps_and_wakes_for_the_next_one(start, tmp_path):
    server = serve(start, tmp_path, SLEEPY).wait_ready()
    pid = server.predict("napper", {}).json["pid"]
    server.until(lambda: state(server) == "sleeping")
    server.until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert server.describe("napper")["workers"] == []
    assert server.request("GET", "/ping").json == {"status": "Healthy"}
    assert server.request("GET", "/readyz").status == 200
    assert server.manage("GET", "/v1/models/napper").json["ready"] is True
    assert server.request("GET", "/v2/models/napper/ready").status == 200
    reply = server.predict("napper", {})
    assert reply.status == 200
    assert reply.json["pid"] != pid


def test_requests_that_come_while_it_wakes_all_wait_for_it(start, tmp_path):
    server = serve(start, tmp_path, SLEEPY, env={"NAPPER_STARTS_S": "1"}).wait_ready()
    server.until(lambda: state(server) == "sleeping")
    replies = server.at_once(lambda body: server.predict("napper", body), [{}] * 6)
    server.until(lambda: state(server) == "loading")
    assert server.request("GET", "/readyz").status == 200
    assert [reply.result().status for reply in replies] == [200] * 6
    assert len({reply.result().json["pid"] for reply in replies}) == 1


def test_model_that_works_does_not_fall_asleep(start, tmp_path):
    server = serve(start, tmp_path, SLEEPY).wait_ready()
    assert server.predict("napper", {"sleep_s": 1.2}).status == 200  # longer than the idle time
    server.until(lambda: state(server) == "sleeping")


def test_model_that_cannot_wake_says_why_and_recovers(start, tmp_path):
    trouble = tmp_path / "trouble"
    server = serve(start, tmp_path, SLEEPY, env={"NAPPER_FAILS_WHILE": str(trouble)}).wait_ready()
    server.until(lambda: state(server) == "sleeping")
    trouble.touch()
    reply = server.predict("napper", {})
    assert reply.status == 503
    assert "no weights today" in reply.message
    assert server.request("GET", "/readyz").status == 503
    trouble.unlink()
    server.until(lambda: server.predict("napper", {}).status == 200)
    assert server.request("GET", "/readyz").status == 200


@pytest.mark.parametrize("max_retry_s", [0, 300])  # it is given up at once, or tried again
def test_model_whose_files_were_broken_while_it_slept_wakes_when_they_are_mended(start, tmp_path, max_retry_s):
    trouble = tmp_path / "trouble"
    config = f"{SLEEPY}maxRetryTimeoutInSec: {max_retry_s}\n"
    server = serve(start, tmp_path, config, env={"NAPPER_FAILS_WHILE": str(trouble)}).wait_ready()
    server.until(lambda: state(server) == "sleeping")
    trouble.write_text("final")
    reply = server.predict("napper", {})
    assert reply.status == 503
    assert "the weights are cut off" in reply.message
    trouble.unlink()
    server.until(lambda: server.predict("napper", {}).status == 200)
    assert not server.logged("napper", level="ERROR")


def test_request_is_a_reason_to_try_a_model_that_never_woke(start, tmp_path):
    trouble = tmp_path / "trouble"
    trouble.write_text("final")
    server = serve(start, tmp_path, SLEEPY, env={"NAPPER_FAILS_WHILE": str(trouble)}).wait_started()
    assert state(server) == "failed"
    assert server.predict("napper", {}).status == 503
    assert len(server.logged("napper", level="ERROR")) == 2
    assert state(server) == "failed"
    trouble.unlink()
    assert server.predict("napper", {}).status == 200


def test_worker_of_a_loaded_model_comes_back_when_its_files_do(start, tmp_path):
    trouble = tmp_path / "trouble"
    config = "minWorkers: 2\nmaxWorkers: 2\n"
    server = serve(start, tmp_path, config, env={"NAPPER_FAILS_WHILE": str(trouble)}).wait_ready()
    trouble.write_text("final")
    os.kill(server.worker_pids("napper")[0], signal.SIGKILL)
    server.until(lambda: "the weights are cut off" in str(server.describe("napper")["workers"]))
    trouble.unlink()
    server.until(lambda: num_ready(server) == 2)


def test_model_grows_after_all_when_its_files_are_mended(start, tmp_path):
    trouble = tmp_path / "trouble"
    server = serve(start, tmp_path, ELASTIC, env={"NAPPER_FAILS_WHILE": str(trouble)}).wait_ready()
    trouble.write_text("final")
    with Load(lambda: server.predict("napper", {"sleep_s": 0.1}), threads=6) as load:
        server.until(lambda: "the weights are cut off" in str(server.describe("napper")["workers"]))
        trouble.unlink()
        server.until(lambda: num_ready(server) > 1)
    assert {reply.status for reply in load.replies} == {200}


def test_start_that_takes_too_long_is_not_waited_for(start, tmp_path):
    trouble = tmp_path / "trouble"
    config = SLEEPY + "startupTimeout: 3\n"
    server = serve(start, tmp_path, config, env={"NAPPER_HANGS_WHILE": str(trouble)}).wait_ready()
    server.until(lambda: state(server) == "sleeping")
    trouble.touch()
    reply = server.predict("napper", {})
    assert reply.status == 503
    assert "startupTimeout" in reply.message
    trouble.unlink()
    server.until(lambda: server.predict("napper", {}).status == 200)


def test_model_can_be_registered_asleep(start, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    pack_handler(store, "napper", config="scaleToZero: true\n")
    server = start("--model-store", store).wait_ready()
    assert server.manage("POST", "/models?url=napper.mar").status == 200
    assert state(server) == "sleeping"
    assert server.request("GET", "/readyz").status == 200
    assert server.predict("napper", {}).status == 200
    assert server.manage("PUT", "/models/napper?min_worker=0").status == 202  # the operator's word counts
    server.until(lambda: server.describe("napper")["workers"] == [])
    assert server.predict("napper", {}).status == 503


def test_handler_is_asked_to_describe_a_model_that_sleeps(start, tmp_path):
    server = serve(start, tmp_path, SLEEPY).wait_ready()
    server.until(lambda: state(server) == "sleeping")
    assert server.manage("GET", "/models/napper?customized=true").status == 200


def test_sleeping_model_is_unregistered_and_the_server_stops(start, tmp_path):
    server = serve(start, tmp_path, SLEEPY).wait_ready()
    server.until(lambda: state(server) == "sleeping")
    assert server.manage("DELETE", "/models/napper").status == 200
    assert server.stop() == 0


@pytest.mark.parametrize("config", [ELASTIC, SLEEPY])
def test_server_stops_in_the_middle_of_a_change(start, tmp_path, config):
    server = serve(start, tmp_path, config, env={"NAPPER_STARTS_S": "0.3"}).wait_ready()
    replies = server.at_once(lambda body: server.predict("napper", body), [{"sleep_s": 0.2}] * 8)
    server.until(
        lambda: any(worker["status"] != "READY" for worker in server.describe("napper")["workers"]) or all_done(replies)
    )
    assert server.stop() == 0
    assert {reply.result().status for reply in replies} <= {200, 503}


def all_done(replies):
    return all(reply.done() for reply in replies)


def test_sleep_and_wake_many_times_with_requests_at_the_edge(start, tmp_path):
    server = serve(start, tmp_path, SLEEPY).wait_ready()
    pause = threading.Event()
    for i in range(8):
        assert server.predict("napper", {}).status == 200
        pause.wait(0.9 + 0.07 * i)  # around the moment when it falls asleep; either way the answer is right
