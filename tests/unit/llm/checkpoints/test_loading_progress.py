"""The bar on the terminal and the lines of the log while a checkpoint is loaded."""

from __future__ import annotations

import io

from flambeau.llm.checkpoints import loading_progress
from flambeau.llm.checkpoints.loading_progress import LoadingBar, LoadingLog, bar, progress_of


def test_a_bar_tells_how_much_of_how_much():
    assert bar("tiny", 1_200_000_000, 2_400_000_000) == (
        "loading tiny  [" + "#" * 15 + "." * 15 + "]   50%  1.2 of 2.4 GB"
    )
    assert bar("tiny", 0, 5_000_000).endswith("]    0%  0.0 of 5.0 MB")
    assert "100%" in bar("empty", 0, 0)


def test_it_is_drawn_on_one_line_that_ends_when_all_is_there():
    stream = io.StringIO()
    show = LoadingBar("tiny", stream)
    for done in range(1001):
        show(done * 1000, 1_000_000)
    drawn = stream.getvalue()
    assert drawn.count("\n") == 1
    assert drawn.endswith("100%  1.0 of 1.0 MB\n")
    assert drawn.count("\r") < 500


def test_without_a_terminal_a_long_load_is_a_line_every_ten_seconds(monkeypatch, caplog):
    caplog.set_level("INFO")
    clock = iter([0.0, 4.0, 11.0, 15.0, 21.0])
    monkeypatch.setattr(loading_progress.time, "monotonic", lambda: next(clock))
    progress = progress_of("tiny")
    assert isinstance(progress, LoadingLog)
    for done in (1, 2, 3, 4):
        progress(done * 10**9, 4 * 10**9)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["loading tiny: 2.0 of 4.0 GB", "loading tiny: 4.0 of 4.0 GB"]
