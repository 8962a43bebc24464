"""HandlerContext: a context without a worker, so that a test can call a handler's methods one by one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flambeau import __version__
from flambeau.archive.manifest import Manifest, manifest_of
from flambeau.config.model import read_options
from flambeau.wire.messages import Request
from flambeau.worker.context import Context
from flambeau.worker.inputs import InputReader, Row, read_headers, types_of

Headers = Mapping[str, str]


class HandlerContext(Context):
    """A worker's context; `rows` is the data for `handle` and `preprocess`, `sent` the values of `context.send`."""

    rows: list[Row]
    sent: list[list[Any]]

    def set_requests(self, requests: Sequence[Any], headers: Headers | Sequence[Headers] = ()) -> list[Row]:
        """Start the next batch: bytes, text or JSON values; headers for all requests, or one mapping each."""
        each = [headers] * len(requests) if isinstance(headers, Mapping) else [*headers] or [{}] * len(requests)
        batch = [to_request(i, body, extra) for i, (body, extra) in enumerate(zip(requests, each, strict=True))]
        reader = InputReader(decode=True)
        self.rows = [reader.read(request) for request in batch]
        self.begin(batch, [types_of(row) for row in self.rows])
        return self.rows

    # ---- the worker's part ----

    def send_values(self, context: Context, values: Sequence[Any], indices: Sequence[int] | None = None) -> None:
        self.sent.append([*values])

    def is_cancelled(self, idx: int = 0) -> bool:
        return False


def new_handler_context(
    *,
    model_dir: str | os.PathLike[str] = ".",
    model_name: str | None = None,
    model_file: str | None = None,
    serialized_file: str | None = None,
    config: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    gpu_id: int | None = None,
    requests: Sequence[Any] = (),
    headers: Headers | Sequence[Headers] = (),
) -> HandlerContext:
    """The context that a worker creates for the model in `model_dir`; other arguments replace what its files say."""
    folder = Path(model_dir).resolve()
    found = manifest_of(folder)
    base = found or Manifest(model_name=folder.name, model_file=model_file, serialized_file=serialized_file)
    document = {**(found.raw if found else base.to_dict())}
    given = {"modelName": model_name, "modelFile": model_file, "serializedFile": serialized_file}
    document["model"] = {**document["model"], **{key: value for key, value in given.items() if value}}
    if config is None:
        config = read_options(folder / base.config_file) if base.config_file else {}
    context = HandlerContext(
        document["model"].get("modelName") or folder.name,
        str(folder),
        document,
        batch_size or max(1, len(requests)),
        gpu_id,
        __version__,
        model_yaml_config=config,
    )
    context.sent, context.rows = [], []
    context.connect(context, read_headers)
    if requests:
        context.set_requests(requests, headers)
    return context


def to_request(number: int, body: Any, headers: Headers) -> Request:
    """A body as a client's request; its Python type sets the content type, unless a header does."""
    if isinstance(body, (bytes, bytearray)):
        content, kind = bytes(body), "application/octet-stream"
    elif isinstance(body, str):
        content, kind = body.encode(), "text/plain"
    else:
        content, kind = json.dumps(body).encode(), "application/json"
    named = {name.lower() for name in headers}
    types = [] if "content-type" in named else [("content-type", kind)]
    return Request(number, f"test-{number}", [*types, *headers.items()], content)
