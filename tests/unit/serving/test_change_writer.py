"""Changes are written in order, and a disk that fails or hangs holds up nobody."""

from __future__ import annotations

import threading
from functools import partial

from flambeau.serving import change_writer
from flambeau.serving.change_writer import ChangeWriter


def write_unless_zero(written, number):
    if number == 0:
        raise OSError(28, "No space left on device")
    written.append(number)


async def test_changes_are_written_in_order_and_the_last_before_it_closes(tmp_path):
    written = []
    writer = ChangeWriter(written.append, tmp_path)
    for number in range(5):
        writer.save(number)
    await writer.close()
    assert written == [0, 1, 2, 3, 4]


async def test_one_that_fails_is_logged_and_the_next_is_written(tmp_path, caplog):
    written = []
    writer = ChangeWriter(partial(write_unless_zero, written), tmp_path)
    writer.save(0)
    writer.save(1)
    await writer.written()
    await writer.close()
    assert written == [1]
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "No space left on device" in record.message


async def test_waiting_ends_although_the_disk_hangs(tmp_path, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(change_writer, "WRITE_S", 0.05)
    writer = ChangeWriter(lambda _: hangs.wait(30), tmp_path)
    writer.save(0)
    await writer.written()
    hangs.set()
    await writer.close()
