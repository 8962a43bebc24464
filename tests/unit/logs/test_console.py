"""What a terminal shows of the logs."""

from __future__ import annotations

import os
import pty
import tty

import pytest

from flambeau.logs.console import Console


@pytest.fixture
def terminal():
    leader, follower = pty.openpty()
    tty.setraw(follower)  # nothing is translated
    yield leader, follower
    os.close(leader), os.close(follower)


@pytest.mark.parametrize(("term", "before"), [("xterm", b"\r\x1b[K"), ("dumb", b"")])
def test_lines_on_a_terminal_take_the_place_of_a_spinner(terminal, monkeypatch, term, before):
    leader, follower = terminal
    monkeypatch.setenv("TERM", term)
    Console(follower).write(b"a line\n")
    assert os.read(leader, 100) == before + b"a line\n"


def test_pipes_and_files_get_lines_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    with open(tmp_path / "log", "wb") as file:
        Console(file.fileno()).write(b"a line\n")
    assert (tmp_path / "log").read_bytes() == b"a line\n"
