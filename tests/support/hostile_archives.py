"""Archives that attack the server."""

from __future__ import annotations

import struct
from pathlib import Path


def write_many_entries(path: Path, number: int, *, claimed: int | None = None) -> Path:
    """A zip of `number` empty entries, which claims `claimed` of them; written by hand, as zipfile is slow at it."""
    local = struct.Struct("<4s5H3L2H").pack(b"PK\x03\x04", 20, 0, 0, 0, 33, 0, 0, 0, 7, 0)
    central = struct.Struct("<4s6H3L5H2L").pack(*(b"PK\x01\x02", 20, 20, 0, 0, 0, 33, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0))
    names = [b"%07d" % entry for entry in range(number)]
    content = local + names[0] + b"".join(central + name for name in names)
    start, size = len(local) + 7, len(content) - len(local) - 7
    claimed = number if claimed is None else claimed
    position = len(content)
    content += struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, claimed, claimed, size, start)
    content += struct.pack("<4sLQL", b"PK\x06\x07", 0, position, 1)
    content += struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(content)
    return path
