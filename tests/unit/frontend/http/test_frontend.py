"""Unix sockets: what may be removed to open one."""

from __future__ import annotations

import errno
import socket

import pytest

from flambeau.config.server import Address
from flambeau.frontend.http.frontend import listen_error, remove_stale_socket


def test_socket_of_a_server_that_is_gone_is_removed(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as orphan:
        orphan.bind(str(path))
    remove_stale_socket(str(path))
    assert not path.exists()
    remove_stale_socket(str(path))


def test_file_that_is_no_socket_stays(tmp_path):
    path = tmp_path / "precious.txt"
    path.write_text("data")
    with pytest.raises(FileExistsError) as caught:
        remove_stale_socket(str(path))
    assert path.read_text() == "data"
    assert "no socket" in listen_error(Address(path=str(path)), caught.value)
    assert caught.value.errno == errno.EEXIST
