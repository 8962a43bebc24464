"""Workers that hang in every way, and workers that are merely slow: only the former are replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from scorecard.case import Case, Stage
from scorecard.probes import is_ours
from support.archives import pack_handler
from support.running import RunningServer

HANG_S = 1
SLOW_S = 10
NUM_WORKERS = 5  # tries at a time


def serve(stage: Stage, num_workers: int = NUM_WORKERS) -> RunningServer:
    config = f"minWorkers: {num_workers}\nmaxWorkers: {num_workers}\nhangTimeoutInSec: {HANG_S}\n"
    server = stage.serve(pack_handler(stage.new_folder("model"), "hanging", config=config))
    server.until(lambda: len(server.worker_pids("hanging")) == num_workers)
    return server


def restarts_of(server: RunningServer) -> int:
    return sum(worker["restarts"] for worker in server.describe("hanging")["workers"])


def learn(server: RunningServer) -> None:
    """Every worker answers something, so that its failures are not in a row."""
    for futures in [server.at_once(lambda o: server.predict("hanging", o), [{"do": "answer"}] * 8) for _ in range(5)]:
        assert all(future.result().status == 200 for future in futures)


def hung(do: str, cause: str) -> Callable[[Stage], None]:
    def run(stage: Stage) -> None:
        server = serve(stage)
        num_tries = stage.scale.of(20, 2)
        answered_s, replies = [], []
        while len(replies) < num_tries:
            server.until(lambda: len(server.worker_pids("hanging")) == NUM_WORKERS, 120)
            learn(server)
            began = time.monotonic()
            number = min(NUM_WORKERS, num_tries - len(replies))
            futures = server.at_once(lambda o: server.predict("hanging", o, timeout=300), [{"do": do}] * number)
            replies += [future.result() for future in futures]
            answered_s.append(time.monotonic() - began)
        found = [
            reply for reply in replies if reply.status == 500 and "it hung" in reply.cause and cause in reply.cause
        ]
        stage.note("tries", num_tries)
        stage.equal("requests that hung two workers and were answered 500 with the cause", len(found), num_tries)
        stage.equal("workers replaced", restarts_of(server), 2 * num_tries)
        stage.note("slowest answer, after two hangs", max(answered_s), "s")
        server.until(lambda: len(server.worker_pids("hanging")) == NUM_WORKERS, 120)
        stage.equal("status of the next request", server.predict("hanging", {"do": "answer"}).status, 200)

    return run


def stopped(stage: Stage) -> None:
    server = serve(stage, 1)
    num_tries = stage.scale.of(20, 2)
    statuses, answered_s = [], []
    for _ in range(num_tries):
        server.until(lambda: server.worker_pids("hanging"), 60)
        learn(server)
        [pid] = server.worker_pids("hanging")
        [future] = server.at_once(lambda o: server.predict("hanging", o, timeout=120), [{"do": "sleep", "s": 1}])
        server.until(lambda pid=pid: "nanosleep" in Path(f"/proc/{pid}/wchan").read_text(), 20)
        began = time.monotonic()
        if pid > 1 and is_ours(pid):
            os.kill(pid, signal.SIGSTOP)
        reply = future.result()
        answered_s.append(time.monotonic() - began)
        statuses.append(reply.status if reply.json.get("pid") != pid else "answered by the stopped worker")
    stage.note("tries", num_tries)
    stage.none("requests that another worker did not answer", [status for status in statuses if status != 200])
    stage.equal("workers replaced", restarts_of(server), num_tries)
    stage.note("slowest answer", max(answered_s), "s")


def slow(stage: Stage) -> None:
    """Each way at once in its own worker; the ones that compute share the cores."""
    num_tries = stage.scale.of(20, 2)
    ways = {"sleep": num_tries, "wait for a thread": num_tries, "compute": stage.scale.of(20, 1)}
    statuses = []
    for way, number in ways.items():
        server = serve(stage, min(number, 10 if way != "compute" else 4))
        learn(server)
        order = {"do": way, "s": SLOW_S if not stage.scale.is_quick else 3}
        futures = server.at_once(lambda o, s=server: s.predict("hanging", o, timeout=300), [order] * number)
        statuses += [future.result().status for future in futures]
        stage.equal(f"workers replaced, {number} × {way} {order['s']} s", restarts_of(server), 0)
        stage.forget(server)
        server.stop(timeout=45)
    stage.none("requests that were not answered 200", [status for status in statuses if status != 200])


CASES = (
    Case(
        name="A handler in an endless loop",
        group="faults",
        promise="Once the model is known to be quick, the worker is replaced; a request that hangs two gets a 500.",
        run=hung("loop", "it computed for"),
        limit_s=600,
    ),
    Case(
        name="A handler that waits for a lock",
        group="faults",
        promise="The worker is replaced; a request that hangs two is answered 500 with the cause.",
        run=hung("lock", "for a lock"),
        limit_s=300,
    ),
    Case(
        name="A handler that waits for a lock and keeps the interpreter",
        group="faults",
        promise="The worker is replaced; a request that hangs two is answered 500 with the cause.",
        run=hung("keep the interpreter", "for a lock"),
        limit_s=300,
    ),
    Case(
        name="A worker stopped by SIGSTOP",
        group="faults",
        promise="The worker is replaced, and another one answers its request.",
        run=stopped,
        limit_s=300,
    ),
    Case(
        name="A handler that is merely slow",
        group="faults",
        promise="No worker is replaced while a request takes 10 s, ten times hangTimeoutInSec, asleep or computing.",
        run=slow,
        limit_s=600,
    ),
)
