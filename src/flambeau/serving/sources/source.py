"""Source: where a model came from and where its files lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flambeau.archive.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model came from and where its files lie."""

    url: str
    folder: Path
    manifest: Manifest | None
    is_temporary: bool = False  # unpacked by us, so ours to delete
    downloaded: Path | None = None  # the file in the store that goes when the model goes
    problem: str = ""  # why it has no files, where its archive could not be read
