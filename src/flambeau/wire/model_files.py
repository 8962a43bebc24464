"""The files of a model folder: their list and the digest of their contents, the same on every machine."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from flambeau.wire.cluster_messages import FileInfo

IGNORED = "__pycache__"  # written by workers themselves


def list_files(folder: Path) -> list[FileInfo]:
    """Every file below the folder, sorted; raises OSError."""
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name != IGNORED]
        for name in names:
            path = Path(parent, name)
            status = path.stat()
            found.append(FileInfo(path.relative_to(folder).as_posix(), status.st_size, status.st_mtime_ns))
    return sorted(found, key=lambda file: file.path)


def digest_of(folder: Path) -> str:
    """A digest of the names and contents of all files. It reads them all: call it in a thread."""
    total = hashlib.sha256()
    for file in list_files(folder):
        with open(folder / file.path, "rb") as opened:
            content = hashlib.file_digest(opened, "sha256").hexdigest()
        total.update(f"{file.path}\0{content}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()
