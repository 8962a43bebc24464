from __future__ import annotations

import os

import pytest

from flambeau.torchserve.pid_file import PidFile


@pytest.fixture
def target(tmp_path):
    target = tmp_path / "precious"
    target.write_text("content")
    return target


@pytest.mark.parametrize("make", [os.symlink, os.link])
def test_link_is_replaced_and_its_target_left_alone(tmp_path, target, make):
    file = PidFile(str(tmp_path / "pid"))
    make(target, file.path)
    file.write(123)
    assert target.read_text() == "content"
    assert not file.path.is_symlink()
    assert file.path.read_text() == "123"


def test_link_to_a_pid_is_not_read(tmp_path, target, capsys):
    target.write_text(str(os.getpid()))
    file = PidFile(str(tmp_path / "pid"))
    file.path.symlink_to(target)
    file.remove(os.getpid())
    assert file.path.is_symlink()
    assert file.read() is None
    assert "Removing orphan pid file." in capsys.readouterr().out
    assert target.read_text() == str(os.getpid())
    assert not file.path.is_symlink()


def test_pipe_does_not_block(tmp_path):
    file = PidFile(str(tmp_path / "pid"))
    os.mkfifo(file.path)
    assert file.read() is None


def test_file_that_cannot_be_removed_is_named(tmp_path, capsys):
    (tmp_path / "pid").mkdir()
    assert PidFile(str(tmp_path / "pid")).read() is None
    assert "cannot be removed" in capsys.readouterr().out


def test_older_file_is_replaced(tmp_path):
    file = PidFile(str(tmp_path / "pid"))
    for pid in (1, 2):
        file.write(pid)
    assert file.path.read_text() == "2"
    file.remove(1)
    assert file.path.exists()
    file.remove(2)
    assert not file.path.exists()
