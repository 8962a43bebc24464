"""Warm-up: runs the example of a model's configuration through its handler before the worker is ready."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.errors import HandlerError
from flambeau.wire.messages import Request
from flambeau.worker.context import Context
from flambeau.worker.inputs import InputReader, types_of
from flambeau.worker.loader import LoadedHandler, finish

logger = logging.getLogger(__name__)

USAGE = "warmup: {body: <JSON>} or warmup: {file: <a file of the model>}, optionally with batch_sizes: [1, 8]"


@dataclass(frozen=True, slots=True)
class Warmup:
    """An example request, and the batch sizes to run it in."""

    body: bytes
    content_type: str
    batch_sizes: Sequence[int]


def read_warmup(options: Mapping[str, Any], folder: Path, batch_size: int) -> Warmup | None:
    """The `warmup` section of a model's configuration; raises HandlerError if it is invalid."""
    section = options.get("warmup")
    if not section:
        return None
    if section is True and "example" in options:
        section = {"body": options["example"]}
    if not isinstance(section, dict) or ("body" in section) == ("file" in section):
        raise HandlerError(f"the warmup section of the model's configuration is invalid; write {USAGE}")
    sizes = section.get("batch_sizes", sorted({1, batch_size}))
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise HandlerError(f"warmup: batch_sizes must be a list of whole numbers from 1 on, not {sizes!r}")
    if "body" in section:
        body = section["body"]
        text = body if isinstance(body, str) and options.get("warmup") is True else json.dumps(body)
        return Warmup(text.encode(), "application/json", sizes)
    import mimetypes

    file = folder / str(section["file"])
    try:
        return Warmup(file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream", sizes)
    except OSError as error:
        raise HandlerError(f"warmup: {section['file']} cannot be read: {error.strerror}") from None


def warm_up(
    handler: LoadedHandler, context: Context, reader: InputReader, loop: asyncio.AbstractEventLoop, warmup: Warmup
) -> None:
    """Run the example in each batch size; raises HandlerError if the handler fails."""
    began = time.perf_counter()
    for size in warmup.batch_sizes:
        headers = [("content-type", warmup.content_type)]
        requests = [Request(-1 - i, f"warm-up-{i}", headers, warmup.body) for i in range(size)]
        rows = [reader.read(request) for request in requests]
        context.begin(requests, [types_of(row) for row in rows])
        try:
            result = handler.handle(rows, context)
            for value in result if isinstance(result, list) else [result]:
                finish(value, loop)
        except Exception as error:
            text = f"the handler failed on its warm-up example: {error}"
            raise HandlerError(text, is_final=False) from error
    context.begin([], [])
    context.take_samples()  # those of the warm-up are not reported
    sizes = ", ".join(map(str, warmup.batch_sizes))
    logger.info("warmed up with batches of %s in %.2f s", sizes, time.perf_counter() - began)
