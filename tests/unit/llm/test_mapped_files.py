"""Pages of weight files are given back, and never those that hold something else."""

from __future__ import annotations

import sys

import pytest
import torch

from flambeau.llm.mapped_files import clean_regions, release_weight_files

SMAPS = """\
7f0000000000-7f0000400000 rw-p 00000000 fe:00 123 /models/my model.safetensors
Rss:                4096 kB
Anonymous:             0 kB
7f0000400000-7f0000500000 rw-p 00000000 fe:00 124 /models/merged.safetensors
Rss:                1024 kB
Anonymous:             4 kB
7f0000500000-7f0000600000 rw-p 00000000 00:00 0
Anonymous:             0 kB
7f0000600000-7f0000700000 r-xp 00000000 fe:00 125 /usr/lib/libtorch.so
Anonymous:             0 kB
"""


def test_only_unchanged_weight_files_are_released():
    assert [*clean_regions(SMAPS)] == [(0x7F0000000000, 0x400000)]


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc here")
def test_weights_can_be_read_after_their_pages_were_released(tmp_path):
    torch.arange(1 << 20).to(torch.int32).numpy().tofile(tmp_path / "kept.bin")
    torch.zeros(1 << 20, dtype=torch.int32).numpy().tofile(tmp_path / "changed.bin")
    kept, changed = (
        torch.from_file(str(tmp_path / name), shared=False, size=1 << 20, dtype=torch.int32)
        for name in ("kept.bin", "changed.bin")
    )
    changed[5] = 7
    release_weight_files()
    assert torch.equal(kept, torch.arange(1 << 20).to(torch.int32))
    assert changed[5] == 7
