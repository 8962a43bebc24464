"""Loads archives as workers do, and asks those that can be loaded: python -m support.load_archives BODY ARCHIVE …

One process loads them all one after the other, so that torch is imported once and not once for each. It prints JSON:
for each archive why it cannot be loaded, or what it answers.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

from flambeau.cli.run import open_model
from flambeau.wire.messages import Request
from flambeau.worker.failures import load_failed
from flambeau.worker.local_worker import LocalWorker


def outcome_of(archive: Path, body: bytes) -> dict[str, str]:
    """The failure as the worker would report it, or the reply."""
    request = Request(0, "0", [("content-type", "application/json")], body)
    with open_model(archive, batch_size=1, handler=None) as load:
        try:
            worker = LocalWorker(load)
        except Exception as error:
            return {"failure": load_failed(error).message}
        with closing(worker):
            return {"reply": worker.handle([request])[0].decode()}


if __name__ == "__main__":
    outcomes = {Path(word).stem: outcome_of(Path(word), sys.argv[1].encode()) for word in sys.argv[2:]}
    sys.stdout.write(json.dumps(outcomes))
