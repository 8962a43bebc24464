from __future__ import annotations

import logging

import pytest

from flambeau.config.server import ServerConfig
from flambeau.logs.line_formats import MODEL_METRICS, SERVER, TS_METRICS
from flambeau.logs.setup import LogSettings, default_files, open_logs


def test_metrics_have_a_folder_of_their_own_if_one_is_named(tmp_path):
    files = default_files(tmp_path / "a", tmp_path / "b")
    assert {channel for channel, path in files.items() if path.parent.name == "b"} == {TS_METRICS, MODEL_METRICS}
    assert files[SERVER] == tmp_path / "a" / "ts_log.log"


@pytest.fixture
def root_logging():
    """Keeps the handlers and levels of Python's logging."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.basicConfig(level=level, handlers=handlers, force=True)
    logging.getLogger("flambeau").setLevel(logging.NOTSET)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, root_logging, capfd):
    (tmp_path / "logs").write_text("a file")
    logs = open_logs(ServerConfig(log_folder=tmp_path / "logs"))
    logs.close()
    [line] = capfd.readouterr().out.splitlines()
    assert "WARN" in line
    assert str(tmp_path / "logs") in line


def test_settings_replace_the_files_and_the_console(tmp_path, root_logging, capfd):
    settings = LogSettings({SERVER: tmp_path / "all.log"}, {SERVER: logging.WARNING}, has_console=False)
    logs = open_logs(ServerConfig(), settings=settings)
    logging.getLogger("flambeau.x").info("quiet")
    logging.getLogger("flambeau.x").warning("loud")
    logs.close()
    text = (tmp_path / "all.log").read_text()
    assert "loud" in text
    assert "quiet" not in text
    assert capfd.readouterr().out == ""
