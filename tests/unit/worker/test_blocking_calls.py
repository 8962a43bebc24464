"""Which line of an async handler blocks its loop."""

from __future__ import annotations

import asyncio
import sys
import threading

from flambeau.worker import blocking_calls
from flambeau.worker.blocking_calls import BlockingCallMonitor, explain_blocking


def test_innermost_line_of_the_author_is_named():
    text = explain_blocking(sys._getframe())
    assert "test_innermost_line_of_the_author_is_named (test_blocking_calls.py:" in text
    assert "`text = explain_blocking(sys._getframe())`" in text
    assert explain_blocking(None) == ""


def test_each_blocking_line_is_named_once_and_waiting_is_no_blocking(event_loop, monkeypatch, caplog):
    monkeypatch.setattr(blocking_calls, "LIMIT_S", 0.05)
    monkeypatch.setattr(blocking_calls, "INTERVAL_S", 0.0)
    warned = threading.Event()
    monkeypatch.setattr(blocking_calls.logger, "warning", lambda *_: (caplog.records.append(_), warned.set()))
    jobs = set()
    monitor = BlockingCallMonitor(event_loop, jobs)

    async def serve():
        monitor.start()
        jobs.add(1)
        monitor.on_job()
        await asyncio.sleep(0.3)
        assert not warned.is_set()
        for _ in range(2):
            warned.wait(10)  # blocks until it is noticed
            threading.Event().wait(0.2)
        jobs.clear()

    event_loop.run_until_complete(serve())
    texts = [record[1] for record in caplog.records if isinstance(record, tuple)]
    assert sum("warned.wait(10)" in text for text in texts) == 1
    assert len(texts) == len(set(texts))
