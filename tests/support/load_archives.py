"""Loads archives as workers do, and asks those that can be loaded: python -m support.load_archives BATCHES ARCHIVE …

One process loads them all one after the other, so that torch is imported once and not once for each. It prints JSON:
for each archive why it cannot be loaded, or for each batch the answers, or why it is refused. BATCHES is a JSON list
of batches, which are lists of bodies.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from flambeau.cli.run import open_model
from flambeau.errors import BadRequest
from flambeau.wire.messages import Request
from flambeau.worker.failures import load_failed
from flambeau.worker.local_worker import LocalWorker


def outcome_of(path: Path, batches: list[list[Any]]) -> dict[str, Any]:
    """The failure as the worker would report it and whether it is final, or the replies to each batch."""
    with open_model(path, batch_size=1, handler=None) as load:
        try:
            worker = LocalWorker(load)
        except Exception as error:
            failed = load_failed(error)
            return {"failure": failed.message, "is_final": failed.is_final}
        with closing(worker):
            return {"replies": [ask(worker, batch) for batch in batches]}


def ask(worker: LocalWorker, batch: list[Any]) -> list[Any] | str:
    headers = [("content-type", "application/json")]
    requests = [Request(i, str(i), headers, json.dumps(body).encode()) for i, body in enumerate(batch)]
    try:
        return [json.loads(reply) for reply in worker.handle(requests)]
    except BadRequest as error:
        return f"refused: {error}"


if __name__ == "__main__":
    outcomes = {Path(word).stem: outcome_of(Path(word), json.loads(sys.argv[1])) for word in sys.argv[2:]}
    sys.stdout.write(json.dumps(outcomes))
