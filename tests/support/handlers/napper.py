"""Takes as long as it is told; its start may be slow, or hang or fail while a file exists."""

import os
import time
from pathlib import Path

from flambeau.errors import HandlerError


class Napper:
    def initialize(self, context):
        trouble = Path(os.environ.get("NAPPER_FAILS_WHILE", "/nonexistent"))
        if trouble.exists():
            raise HandlerError("the weights are cut off") if trouble.read_text() else RuntimeError("no weights today")
        while Path(os.environ.get("NAPPER_HANGS_WHILE", "/nonexistent")).exists():
            time.sleep(0.05)
        time.sleep(float(os.environ.get("NAPPER_STARTS_S", "0")))

    def handle(self, rows, context):
        for row in rows:
            time.sleep(row.get("body", {}).get("sleep_s", 0))
        return [{"pid": os.getpid()} for _ in rows]
