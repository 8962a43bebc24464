"""`flambeau run`: runs a handler in this process, without a server. open_model(): a path as a Load message."""

from __future__ import annotations

import json
import mimetypes
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from flambeau.archive.manifest import explain_folder
from flambeau.cli.output import StageRow, median_call, print_json, print_rows, stage_rows
from flambeau.config.model import ModelConfig, read_options
from flambeau.errors import BadRequest, ConfigError
from flambeau.serving.model_sources.store import Source, Store
from flambeau.wire.example_requests import to_body
from flambeau.wire.messages import Load, Request
from flambeau.worker.code_mistakes import locate
from flambeau.worker.code_places import is_own
from flambeau.worker.failures import explain
from flambeau.worker.handler_mistakes import explain_exit, explain_interrupt, explain_training
from flambeau.worker.local_worker import LocalWorker
from flambeau.worker.stage_timings import CallProfile, StageObserver, device_of

MAX_SHOWN = 100  # characters of an example
BLOCKING_S = 1.0  # in an event loop, as the server
JSON_HEADERS = [("content-type", "application/json")]


def run(
    path: Path,
    inputs: Sequence[Path],
    content_type: str | None,
    *,
    handler: str | None,
    repeat: int,
    as_json: bool,
) -> None:
    """Load a handler, run the inputs as one batch, and print the replies and a table of times."""
    sys.excepthook = show_error
    with open_model(path, batch_size=max(1, len(inputs)), handler=handler) as load:
        began = time.perf_counter()
        observer = StageObserver()
        with telling_of_exits():
            worker = LocalWorker(load, observer, blocking_s=BLOCKING_S)
        loaded_s = time.perf_counter() - began
        if sentence := explain_training(worker.loaded.handler, worker.loaded.handle):
            print(f"warning: {sentence}", file=sys.stderr)
        print(f"loaded {load.handler} in {loaded_s:.3f} s", file=sys.stderr)
        requests = [to_request(i, file, content_type) for i, file in enumerate(inputs)]
        requests = requests or [Request(0, "run-0", JSON_HEADERS, body) for body in example_bodies(worker)]
        if not requests:
            print(
                "no input: pass a request body with --input FILE, or set `example = …` in the handler", file=sys.stderr
            )
            return
        calls = []
        replies: list[bytes] = []
        for _ in range(repeat):
            with telling_of_exits():
                replies = worker.handle(requests)
            calls.append(observer.call)
        worker.close()
        print_times(calls, loaded_s, worker)
        print_replies(replies, as_json=as_json)


@contextmanager
def telling_of_exits() -> Iterator[None]:
    """Fail, and say why, if the handler calls sys.exit or raises KeyboardInterrupt: it would end a worker."""
    try:
        yield
    except SystemExit as error:
        print(f"{explain_exit(error)}. It ends the worker: raise an exception instead", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt as error:
        print(explain_interrupt(error), file=sys.stderr)
        raise


def print_times(calls: Sequence[CallProfile], loaded_s: float, worker: LocalWorker) -> None:
    """Print the time of loading and of the call; of several calls, the first and the median."""
    initialize_s, device = worker.loaded.initialize_s, device_of(worker.loaded.handler)
    rows = [
        StageRow(name="import", output="", times_ms=((loaded_s - initialize_s) * 1000,)),
        StageRow(name="initialize", output=f"on {device}" if device else "", times_ms=(initialize_s * 1000,)),
    ]
    if len(calls) == 1:
        print_rows([*rows, *stage_rows(calls)], ["ms"])
    else:
        print_rows([*rows, *stage_rows([calls[0], median_call(calls)])], ["first ms", f"median of {len(calls)} ms"])


def show_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback from the user's first frame on, and what it means, in the words of the server.

    The exception is not changed, so that a debugger has it all.
    """
    first = trace
    while first is not None and not is_own(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    sentence = explain(error) or locate(error)
    if first is not None or not sentence:
        traceback.print_exception(kind, error, first or trace)
    if sentence:
        print(sentence, file=sys.stderr)


def print_replies(replies: Sequence[bytes], *, as_json: bool) -> None:
    """Print each reply on stdout, or a JSON list of their texts."""
    if as_json:
        print_json([reply.decode("utf-8", "replace") for reply in replies])
        return
    for reply in replies:
        sys.stdout.buffer.write(reply.rstrip(b"\n") + b"\n")
    sys.stdout.buffer.flush()


@contextmanager
def open_model(path: Path, *, batch_size: int, handler: str | None = None) -> Iterator[Load]:
    """The Load message for a handler file, a model file, a folder or an archive, which is unpacked temporarily."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give a handler file, a model file, a model folder or an archive")
    store = Store(None)
    try:
        source = store.open_path(path)
        manifest = source.manifest
        is_handler = path.suffix == ".py"
        if path.is_dir() and manifest is None and not handler and not (path / "handler.py").is_file():
            raise ConfigError(explain_folder(path))
        yield Load(
            model=manifest.model_name if manifest and not is_handler else path.stem,
            version=manifest.version if manifest else "1.0",
            folder=str(source.folder),
            handler=handler or (path.name if is_handler else (manifest.handler if manifest else "") or "handler.py"),
            batch_size=batch_size,
            gpu_id=None,
            decode_input=True,
            limit_max_image_pixels=True,
            max_response_bytes=1 << 40,
            envelope=configured_envelope(source),
        )
    finally:
        store.close()


def configured_envelope(source: Source) -> str:
    file = source.manifest.config_file if source.manifest else None
    options = read_options(source.folder / file) if file else {}
    return ModelConfig().with_options(options).envelope or ""


def example_bodies(worker: LocalWorker) -> Iterator[bytes]:
    """The example of the model's settings or of its handler, which is JSON; nothing if there is none."""
    example = (worker.context.model_yaml_config or {}).get("example")
    text = worker.loaded.example if example is None else example if isinstance(example, str) else json.dumps(example)
    if text:
        print(f"no input: the example of the handler is sent: {text[:MAX_SHOWN]}", file=sys.stderr)
        yield to_body(text)


def to_request(number: int, file: Path, content_type: str | None) -> Request:
    """A file as a client's request; the content type is guessed from its name unless given."""
    try:
        body = file.read_bytes()
    except OSError as error:
        raise BadRequest(f"{file} cannot be read: {error.strerror}") from None
    kind = content_type or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return Request(number, f"run-{number}", [("content-type", kind)], body)
