"""Workers that hang are replaced, those that are slow are not; each death leaves a bundle that can be replayed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import wait
from pathlib import Path

import pytest

from support.archives import pack_handler
from support.running import HANDLERS, RunningServer, path

ONE_WORKER = "minWorkers: 1\nmaxWorkers: 1\n"
QUICK = ONE_WORKER + "hangTimeoutInSec: 0.5\nload_s: 0.5\n"  # an endless loop hangs after 1.5 s of computing time
SLOW_S = 4


def order(do, **more):
    return {"do": do, **more}


def serve(folder, config, *arguments):
    model = pack_handler(folder, "hanging", config=config)
    return RunningServer(folder / "server.log", str(model), *arguments).wait_ready()


def learn(server):
    """Let the server learn that the model is quick, and that the worker is of use."""
    for _ in range(25):
        assert server.predict("hanging", order("answer")).status == 200


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = serve(tmp_path_factory.mktemp("hangs"), QUICK)
    yield server
    server.stop(timeout=40)


def bundles_of(server):
    """The documents of its crash bundles, the newest first, with their folders."""
    files = sorted((server.log_path.parent / "crashes").glob("[!.]*/bundle.json"), reverse=True)
    return [(file.parent, json.loads(file.read_text())) for file in files]


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("loop", "it computed for"),
        ("lock", "for a lock that no other thread of it can release"),
        ("keep the interpreter", "for a lock that no other thread of it can release"),
    ],
)
def test_worker_that_hangs_is_replaced_and_a_job_that_hangs_two_is_failed(server, do, reason):
    learn(server)
    restarts = server.describe("hanging")["workers"][0]["restarts"]
    reply = server.predict("hanging", order(do), timeout=100)
    assert reply.status == 500
    assert "it hung" in reply.cause
    assert reason in reply.cause
    worker = server.describe("hanging")["workers"][0]
    assert worker["restarts"] == restarts + 2
    assert worker["lastFailure"]["hung"]
    assert server.logged("it hung", reason, level="ERROR")
    bundle = Path(worker["lastFailure"]["bundle"])
    server.until((bundle / "bundle.json").exists)
    assert "in obey" in (bundle / "stacks.txt").read_text()
    document = json.loads((bundle / "bundle.json").read_text())
    assert (document["kind"], document["requests"][0]["crashes"]) == ("hang", 2)


def test_stopped_worker_is_replaced_and_its_job_answered_by_the_next(server):
    learn(server)
    [pid] = server.worker_pids("hanging")
    [reply] = server.at_once(lambda o: server.predict("hanging", o), [order("sleep", s=1)])
    server.until(lambda: is_asleep(pid))
    os.kill(pid, signal.SIGSTOP)
    answer = reply.result()
    assert answer.status == 200
    assert answer.json["pid"] != pid
    assert "SIGSTOP" in server.failure("hanging")


def is_asleep(pid):
    """Whether its main thread is in time.sleep."""
    return "nanosleep" in Path(f"/proc/{pid}/wchan").read_text()


def test_idle_worker_that_is_stopped_is_replaced_and_readiness_follows(server):
    learn(server)
    [pid] = server.worker_pids("hanging")
    os.kill(pid, signal.SIGSTOP)
    not_ready = server.until(lambda: (reply := server.request("GET", "/readyz")).status == 503 and reply)
    [model] = not_ready.json["models"]
    assert "it hung" in "".join(model["lastFailure"])
    server.until(lambda: server.request("GET", "/readyz").status == 200)
    assert server.worker_pids("hanging") != [pid]
    assert server.predict("hanging", order("answer")).status == 200


def test_loop_without_an_end_in_the_very_first_request_is_found(tmp_path):
    server = serve(tmp_path, QUICK)
    try:
        reply = server.predict("hanging", order("count"), timeout=100)
        assert (reply.status, "in a loop that has no end (obey, line" in reply.cause) == (500, True), reply.text
    finally:
        server.stop(timeout=40)


@pytest.fixture(scope="module")
def slow_replies(tmp_path_factory):
    """The answers of a model that is slow in every way at once, one worker for each, and the server's log of it."""
    ways = ["sleep", "compute", "allocate", "wait", "wait for a thread"]
    config = f"minWorkers: {len(ways)}\nmaxWorkers: {len(ways)}\nhangTimeoutInSec: 0.5\n"
    server = serve(tmp_path_factory.mktemp("slow"), config)
    futures = server.at_once(lambda o: server.predict("hanging", o), [order(way, s=SLOW_S) for way in ways])
    health = []
    while wait(futures, timeout=0.2).not_done:
        health += [worker.get("health", "") for worker in server.describe("hanging")["workers"]]
    described = server.describe("hanging")["workers"]
    server.until(lambda: not any("health" in worker for worker in server.describe("hanging")["workers"]))
    server.stop(timeout=40)
    return dict(zip(ways, (future.result() for future in futures), strict=True)), described, health


@pytest.mark.parametrize("way", ["sleep", "compute", "allocate", "wait", "wait for a thread"])
def test_slow_worker_is_not_replaced(slow_replies, way):
    replies, workers, _ = slow_replies
    assert replies[way].status == 200
    assert [worker["restarts"] for worker in workers] == [0] * len(workers)


def test_slow_worker_is_called_slow(slow_replies):
    _, _, health = slow_replies
    assert any(words.startswith("slow: no progress for") for words in health)


def test_detection_can_be_turned_off(tmp_path):
    server = serve(tmp_path, QUICK + "hangDetection: false\nresponseTimeout: 2\n")
    try:
        learn(server)
        reply = server.predict("hanging", order("lock"))
        assert "no answer within responseTimeout, 2 s" in reply.cause
        server.until(lambda: bundles_of(server))
        [(folder, document)] = bundles_of(server)
        assert document["kind"] == "crash"
        assert "in obey" in (folder / "stacks.txt").read_text()  # also of one that has just timed out
    finally:
        server.stop(timeout=40)


# ---- bundles ----


def replay(*arguments):
    words = [sys.executable, "-m", "flambeau.cli.main", "replay", *map(str, arguments)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, "PYTHONPATH": path()}
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """The crash folder of a server that stores payloads, after a crash and a request that could not be loaded."""
    folder = tmp_path_factory.mktemp("crashed")
    server = RunningServer(folder / "server.log", str(HANDLERS / "hanging.py"), "--crash-payloads").wait_ready()
    assert server.predict("hanging", order("exit")).status == 500
    server.stop(timeout=40)  # which waits for the bundle
    return folder / "crashes"


def test_replay_lists_bundles(crashed):
    status, out, _ = replay("--list", "--folder", crashed)
    assert status == 0
    assert "crash" in out
    assert "exited with code 3" in out
    status, out, _ = replay("--folder", crashed, "--json")
    assert json.loads(out)[0]["reason"] == "exited with code 3"


def test_replay_sends_the_stored_request_and_reports_that_the_worker_dies_again(crashed):
    [bundle] = [file.parent for file in crashed.glob("*/bundle.json")]
    status, out, err = replay(bundle)
    assert (status, "it dies again: exited with code 3" in out) == (1, True), err


def test_replay_sends_another_request_that_does_not_kill_the_worker(crashed, tmp_path):
    [bundle] = [file.parent for file in crashed.glob("*/bundle.json")]
    file = tmp_path / "request.json"
    file.write_text('{"do": "answer"}')
    status, out, err = replay(bundle.name, "--folder", crashed, "--payload", file)
    assert (status, "does not die" in out) == (0, True), err
    assert "another request" in err


def test_replay_needs_a_request_if_the_bundle_has_only_its_fingerprint(crashed, tmp_path):
    [bundle] = [file.parent for file in crashed.glob("*/bundle.json")]
    document = json.loads((bundle / "bundle.json").read_text())
    document["requests"][0]["payload"] = None
    (tmp_path / "bundle.json").write_text(json.dumps(document))
    status, _, err = replay(tmp_path)
    assert status == 2
    assert "--payload" in err
    assert document["requests"][0]["sha256"] in err
    document["model"]["path"] = "/nowhere"
    (tmp_path / "bundle.json").write_text(json.dumps(document))
    status, _, err = replay(tmp_path, "--payload", tmp_path / "bundle.json")
    assert (status, "--model PATH" in err) == (2, True)
