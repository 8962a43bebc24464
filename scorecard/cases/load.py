"""More load than the workers can take."""

from __future__ import annotations

import time

from scorecard.case import Case, Stage
from scorecard.probes import LatencyProbe, OwnAnswersClient
from support.running import RunningServer

# About 60 of 160 clients find the queue full: with this pause they ask 2,000 times a second, ten times what is served.
PAUSE_S = 0.03


def overload(stage: Stage) -> None:
    server = stage.configured("napper_echo.py", job_queue_size=100)
    seconds = stage.scale.of(6, 2)
    peak = goodput(server, 16, seconds)
    with LatencyProbe(server) as probe:
        under_load = goodput(server, 160, seconds, stage, pause_s=PAUSE_S)
    stage.note("goodput with 16 clients", peak, "/s")
    stage.note("goodput with 160 clients", under_load, "/s")
    stage.at_least("share of the peak", under_load / peak, 0.9)
    probe.judge(stage)


def goodput(
    server: RunningServer, connections: int, seconds: float, stage: Stage | None = None, *, pause_s: float = 0.0
) -> float:
    """Good answers per second."""
    model = "napper_echo"
    with OwnAnswersClient(server, model, connections, pause_s=pause_s, large_every=0, timeout_s=30) as client:
        time.sleep(1)
        before, began = client.tally.answered, time.monotonic()
        time.sleep(seconds)
        rate = (client.tally.answered - before) / (time.monotonic() - began)
    if stage is not None:
        client.judge(stage)
    return rate


def steady(stage: Stage) -> None:
    server = stage.serve("echo.py", "--workers", "2")
    with LatencyProbe(server) as probe, OwnAnswersClient(server, connections=16) as client:
        time.sleep(stage.scale.of(8, 2))
    client.judge(stage, refusals=False)
    ordered = sorted(client.tally.times)
    stage.note("answers per second", client.tally.answered / stage.scale.of(8, 2))
    stage.note("p50 of an answer", ordered[len(ordered) // 2], "ms")
    stage.note("p99 of an answer", ordered[int(0.99 * len(ordered))], "ms")
    probe.judge(stage)


CASES = (
    Case(
        name="Ten times the load",
        group="load",
        promise="Goodput stays above 0.9 of its peak; the others get 503 at once.",
        run=overload,
    ),
    Case(
        name="Steady load",
        group="load",
        promise="Every answer is 200 and belongs to its request; /livez answers within 50 ms (p99).",
        run=steady,
        is_quick=True,
    ),
)
