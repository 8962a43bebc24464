"""Workers and models that come and go in numbers, beside clients who check whose answer they get."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fault.test_worker_storms import MANY, ONE, pipeline
from scorecard.case import Case, Stage
from scorecard.probes import LatencyProbe, OwnAnswersClient
from support.archives import pack_handler
from support.running import RunningServer

STORM = "No crash, no lost or crossed answer, and /livez answers within 50 ms (p99)."


def scale_storm(stage: Stage) -> None:
    server = stage.serve("echo.py")
    with OwnAnswersClient(server) as client, LatencyProbe(server) as probe:
        num_rounds = for_seconds(stage.scale.of(10, 2), lambda: scale_up_and_down(server))
    stage.note("pairs of scale calls (6, then 1)", num_rounds)
    judge_storm(stage, server, client, probe)


def scale_up_and_down(server: RunningServer) -> None:
    statuses = pipeline(server, f"PUT /models/echo?{MANY}", f"PUT /models/echo?{ONE}")
    assert statuses == [b"202", b"202"], statuses


def register_storm(stage: Stage) -> None:
    archive = pack_handler(stage.folder, "echo", name="other")
    server = stage.serve("echo.py", "--model-store", stage.folder)

    def come_and_go(name: str) -> None:
        register = f"/models?url={archive.name}&model_name={name}&initial_workers=2&synchronous=false"
        reply = server.manage("POST", register)
        assert reply.status in (200, 202), reply.text
        reply = server.manage("DELETE", f"/models/{name}")
        assert reply.status == 200, reply.text

    seconds = stage.scale.of(10, 2)
    with OwnAnswersClient(server) as client, LatencyProbe(server) as probe, ThreadPoolExecutor(4) as clients:
        names = [f"other-{i}" for i in range(4)]
        rounds = [*clients.map(lambda name: for_seconds(seconds, lambda: come_and_go(name)), names)]
    stage.note("registrations and removals by four clients", sum(rounds))
    judge_storm(stage, server, client, probe)


def judge_storm(stage: Stage, server: RunningServer, client: OwnAnswersClient, probe: LatencyProbe) -> None:
    client.judge(stage, refusals=False)
    probe.judge(stage)
    stage.equal('"Bad file descriptor" in the log', server.log.count("Bad file descriptor"), 0)


def for_seconds(seconds: float, action: Callable[[], None]) -> int:
    """Do it again and again; return how often."""
    deadline, count = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        action()
        count += 1
    return count


CASES = (
    Case(name="Scaling up and down at once", group="faults", promise=STORM, run=scale_storm, is_quick=True),
    Case(name="Models registered and removed by four clients", group="faults", promise=STORM, run=register_storm),
)
