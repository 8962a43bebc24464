from __future__ import annotations

import gzip
import os
import re
import threading
import time

from flambeau.logs.rolling_file import RollingFile, packed


def compressing():
    return [thread for thread in threading.enumerate() if thread.name == "compress-log"]


def test_files_are_rolled_by_size_and_five_are_kept(tmp_path):
    file = RollingFile(tmp_path / "ts_log.log", max_bytes=100)
    for number in range(9):
        file.write(f"{number}".encode() * 80 + b"\n")
        for thread in compressing():
            thread.join()
    file.close()
    assert (tmp_path / "ts_log.log").read_bytes() == b"8" * 80 + b"\n"
    kept = packed(tmp_path / "ts_log.log")
    assert len(kept) == 5
    assert all(re.fullmatch(r"ts_log\.\d\d-[A-Za-z]{3}(\.\d)?\.log\.gz", path.name) for path in kept)
    assert sorted(gzip.decompress(path.read_bytes())[:1] for path in kept) == [b"3", b"4", b"5", b"6", b"7"]


def test_files_are_rolled_every_day(tmp_path):
    path = tmp_path / "access_log.log"
    path.write_bytes(b"yesterday\n")
    yesterday = time.time() - 86_400
    os.utime(path, (yesterday, yesterday))
    file = RollingFile(path)
    file.write(b"today\n")
    for thread in compressing():
        thread.join()
    file.close()
    assert path.read_bytes() == b"today\n"
    day = time.strftime("%d-%b", time.localtime(yesterday))
    assert gzip.decompress((tmp_path / f"access_log.{day}.log.gz").read_bytes()) == b"yesterday\n"
