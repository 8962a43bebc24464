"""Opens a model for commands that run its handler in their own process."""

from __future__ import annotations

import mimetypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flambeau.config.model import ModelConfig, read_options
from flambeau.errors import BadRequest, ConfigError
from flambeau.serving.model_sources.store import Source, Store
from flambeau.wire.messages import Load, Request


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


def to_request(number: int, file: Path, content_type: str | None) -> Request:
    """A file as a client's request; the content type is guessed from its name unless given."""
    try:
        body = file.read_bytes()
    except OSError as error:
        raise BadRequest(f"{file} cannot be read: {error.strerror}") from None
    kind = content_type or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return Request(number, f"run-{number}", [("content-type", kind)], body)
