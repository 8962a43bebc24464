"""KeptResults: the figures of a run in a dated JSON file, written after each of them, as a lease may end at any time.

A part that fails is named there and printed, and the other parts go on.
"""

import json
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ERROR_LENGTH = 500  # of what is kept of an error's words


class KeptResults:
    """`figures` are changed by the run, and written by `save`."""

    def __init__(self, folder: Path | None, name: str, figures: Mapping[str, Any]) -> None:
        """Without a folder, nothing is written."""
        now = datetime.now(UTC)
        self.figures: dict[str, Any] = {"date": now.isoformat(timespec="seconds"), **figures}
        self._began = time.monotonic()
        self.file: Path | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = folder / f"{now:%Y-%m-%d-%H%M}-{name}.json"
        self.save()

    def save(self) -> None:
        self.figures["duration_s"] = round(time.monotonic() - self._began)
        if self.file is not None:
            self.file.write_text(json.dumps(self.figures, indent=1) + "\n")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the run, after which the file is written; an error of it is kept by its name."""
        try:
            yield
        except Exception as error:
            words = f"{type(error).__name__}: {error}"[:ERROR_LENGTH]
            self.figures.setdefault("errors", {})[name] = words
            print(f"{name} failed: {words}", file=sys.stderr, flush=True)
            traceback.print_exc()
        self.save()

    @property
    def has_errors(self) -> bool:
        return "errors" in self.figures
