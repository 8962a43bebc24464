"""What becomes of the lines that a worker prints."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from flambeau.serving.events import ServerEvents
from flambeau.serving.workers import worker_output
from flambeau.serving.workers.worker_output import REPORTED_LINES, KernelKills, WorkerOutput, count_kernel_kills


class Printed:
    """A worker's output, with what was logged and measured of it."""

    def __init__(self, *, is_json=False):
        self.logged, self.samples = [], []
        logs = SimpleNamespace(
            is_json=is_json, add=lambda line, lines, _: self.logged.append((line.level, line.thread, lines))
        )
        self.output = WorkerOutput(logs, "W-1-m_1.0", self.samples.extend, ServerEvents(), "m")

    async def forward(self, *chunks, is_error=False):
        stream = asyncio.StreamReader()
        for chunk in chunks:
            stream.feed_data(chunk)
        stream.feed_eof()
        await self.output.forward(stream, is_error=is_error)


async def test_lines_go_to_the_model_log_and_the_last_ones_are_kept():
    printed = Printed()
    await printed.forward(b"one\nt", b"wo\n", b"\nend")
    lines = [line for _, _, lines in printed.logged for line in lines]
    assert lines == [b"one", b"two", b"", b"end"]
    assert {(level, thread) for level, thread, _ in printed.logged} == {(logging.INFO, "W-1-m_1.0-stdout")}
    assert printed.output.tail.lines() == ("one", "two", "end")


async def test_stderr_is_logged_as_warnings():
    printed = Printed()
    await printed.forward(b"oops\n", is_error=True)
    assert printed.logged == [(logging.WARNING, "W-1-m_1.0-stderr", [b"oops"])]


async def test_records_of_a_worker_keep_their_level_and_order():
    printed = Printed(is_json=True)
    await printed.forward(b'before\n\x1e[40,"own","failed\\nbadly",{"request_id":"7"}]\n\x1enonsense\n')
    worker = "W-1-m_1.0"
    assert printed.logged == [
        (logging.INFO, f"{worker}-stdout", [b"before"]),
        (logging.ERROR, worker, ("failed\nbadly", {"request_id": "7"})),
        (logging.INFO, f"{worker}-stdout", [b"\x1enonsense"]),
    ]
    assert printed.output.tail.lines() == ("before", "failed", "badly", "\x1enonsense")


async def test_only_the_last_lines_are_kept():
    printed = Printed()
    await printed.forward(b"".join(b"%d\n" % i for i in range(100)))
    assert printed.output.tail.lines() == tuple(map(str, range(100 - REPORTED_LINES, 100)))


async def test_metrics_lines_become_samples_and_are_not_logged(caplog):
    printed = Printed()
    await printed.forward(b"[METRICS]Size.Count:3|#ModelName:m|#hostname:h,1700000000\n[METRICS]nonsense\n")
    assert [sample[0] for sample in printed.samples] == ["Size"]
    assert printed.logged == []
    assert [(record.event, record.worker) for record in caplog.records] == [("metric_rejected", "W-1-m_1.0")]


@pytest.mark.parametrize(("rank", "name"), [(0, "W-1-m_1.0"), (2, "W-1-m_1.0-rank-2")])
def test_each_rank_has_a_name_of_its_own(rank, name):
    output = Printed().output
    assert output.of_rank(rank).name == name


def test_kernel_kills_are_counted():
    assert count_kernel_kills() >= 0


def test_only_a_late_kill_by_the_kernel_explains_an_exit(monkeypatch):
    count = 3
    monkeypatch.setattr(worker_output, "count_kernel_kills", lambda: count)
    kills = KernelKills()
    assert not kills.has_new
    count += 1
    assert kills.has_new
    kills.look()
    assert kills.has_new
    kills.look()
    assert not kills.has_new  # it was another process
