"""`flambeau run`: a handler in this process, without a server, for a debugger."""

from __future__ import annotations

import mimetypes
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from flambeau.errors import BadRequest, ConfigError
from flambeau.serving.store import Store
from flambeau.wire.messages import Load, Request
from flambeau.worker.in_process import InProcess


def run(path: Path, inputs: Sequence[Path], content_type: str | None, *, as_json: bool) -> None:
    """Load a handler, give it the inputs as one batch, print what it answers."""
    sys.excepthook = show_error
    if not path.exists():
        raise ConfigError(f"{path} does not exist; name a handler file, a model folder or an archive")
    store = Store(None)
    try:
        source = store.open_path(path)
        manifest = source.manifest
        handler = (
            manifest.handler if manifest and manifest.handler else path.name if path.suffix == ".py" else "handler.py"
        )
        load = Load(
            model=manifest.model_name if manifest else path.stem,
            version=manifest.version if manifest else "1.0",
            folder=str(source.folder),
            handler=handler,
            batch_size=max(1, len(inputs)),
            gpu_id=None,
            decode_input=True,
            limit_max_image_pixels=True,
            max_response_bytes=1 << 40,
        )
        began = time.perf_counter()
        worker = InProcess(load)
        loaded = time.perf_counter()
        print(f"loaded {handler} in {loaded - began:.3f} s", file=sys.stderr)
        if not inputs:
            print("nothing was run: give it a request with --input FILE", file=sys.stderr)
        else:
            replies = worker.handle([to_request(i, file, content_type) for i, file in enumerate(inputs)])
            worker.close()
            print(f"answered {len(inputs)} in {time.perf_counter() - loaded:.3f} s", file=sys.stderr)
            print_replies(replies, as_json=as_json)
    finally:
        store.close()


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception from the user's first line on; the exception itself stays free for a debugger."""
    inside = str(Path(__file__).parents[1])
    first = trace
    while first is not None:
        file = first.tb_frame.f_code.co_filename
        if not (file.startswith((inside, "<frozen")) or "typer" in file):
            break
        first = first.tb_next
    traceback.print_exception(kind, error, first or trace)


def to_request(number: int, file: Path, content_type: str | None) -> Request:
    """A file as the request a client would send with it."""
    try:
        body = file.read_bytes()
    except OSError as error:
        raise BadRequest(f"{file} cannot be read: {error.strerror}") from None
    kind = content_type or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return Request(number, f"run-{number}", [("content-type", kind)], body)


def print_replies(replies: Sequence[bytes], *, as_json: bool) -> None:
    """Print each reply on stdout; as JSON, a list of their texts."""
    if as_json:
        from flambeau.cli.models import print_json

        print_json([reply.decode("utf-8", "replace") for reply in replies])
        return
    for reply in replies:
        sys.stdout.buffer.write(reply.rstrip(b"\n") + b"\n")
    sys.stdout.buffer.flush()
