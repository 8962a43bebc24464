from __future__ import annotations

import os

from flambeau.serving.workers.memory import available_bytes, resident_bytes, resident_bytes_of


def test_own_memory_is_told_and_that_of_nobody_is_nothing():
    assert resident_bytes(os.getpid()) > 1 << 20
    assert resident_bytes_of([os.getpid(), -1]) > 1 << 20
    assert resident_bytes(-1) == resident_bytes(1 << 30) == 0


def test_memory_left_is_the_smaller_of_the_hosts_and_the_containers(tmp_path):
    host = tmp_path / "meminfo"
    host.write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    assert available_bytes(tmp_path / "none", host) == 5000 << 10
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100\n")
    assert available_bytes(tmp_path, host) == 5000 << 10
    (tmp_path / "memory.max").write_text("1000\n")
    assert available_bytes(tmp_path, host) == 400
