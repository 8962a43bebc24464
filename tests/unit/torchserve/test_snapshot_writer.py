"""Snapshots on disk: for this user only."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

from flambeau.torchserve.snapshot_writer import SnapshotWriter


def test_snapshot_is_private_and_keeps_what_a_start_needs(tmp_path):
    async def write():
        server = SimpleNamespace(registry=[], config=SimpleNamespace(model_store=None))
        writer = SnapshotWriter(tmp_path / "config", {"keystore_pass": "changed"}, server)
        writer.save("startup")
        await writer.close()

    mask = os.umask(0)
    try:
        asyncio.run(write())
    finally:
        os.umask(mask)
    [file] = (tmp_path / "config").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert "keystore_pass=changed" in file.read_text()
