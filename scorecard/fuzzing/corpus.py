"""The corpus: small files under scorecard/corpus, a folder for each target. Inputs that broke something join it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from scorecard import CORPUS

MAX_BYTES = 64 << 10  # larger inputs do not belong into a repository


def files_of(target: str) -> list[Path]:
    return sorted(file for file in (CORPUS / target).iterdir() if file.is_file())


def inputs_of(target: str) -> list[bytes]:
    return [file.read_bytes() for file in files_of(target)]


def save(target: str, data: bytes) -> Path:
    """Keep an input that broke something, under a name of its content."""
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"found-{hashlib.sha256(data).hexdigest()[:12]}"
    if len(data) <= MAX_BYTES:
        file.write_bytes(data)
    return file
