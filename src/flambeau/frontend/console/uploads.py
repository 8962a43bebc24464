"""Uploads: archives that arrive in pieces and become files of the model store."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from flambeau.config.server import ServerConfig
from flambeau.errors import BadRequest, FileTaken, NotAllowed
from flambeau.serving.model_sources.downloader import DEFAULT_LIMITS, PART, publish
from flambeau.serving.model_sources.store import ARCHIVE_SUFFIXES, NO_STORE

NAME = re.compile(r"\w[\w.+-]{0,200}", re.ASCII)


def check_allowed(config: ServerConfig) -> Path:
    """The model store, if clients may put archives there; raises with the remedy."""
    if not config.allow_uploads or not config.model_api:
        raise NotAllowed("This server accepts no uploads; start it with --allow-uploads.")
    if config.model_store is None:
        raise BadRequest(f"There is no model store for the archive; {NO_STORE}.")
    return config.model_store


def check_name(name: str) -> None:
    if not NAME.fullmatch(name) or not name.endswith(ARCHIVE_SUFFIXES):
        raise BadRequest(f"{name[:80]!r} is not the name of an archive; it must end with {', '.join(ARCHIVE_SUFFIXES)}")


def add_piece(store: Path, name: str, piece: bytes, *, offset: int, size: int) -> bool:
    """Write a piece of an archive of `size` bytes; the last one gives the file its name. Whether it was the last.

    A piece at 0 begins anew; any other must follow the one before.
    """
    check_name(name)
    part, target = store / f".{name}{PART}", store / name
    if target.exists():
        raise FileTaken(name)
    if not 0 < size <= DEFAULT_LIMITS.max_bytes or offset < 0 or offset + len(piece) > size or not piece:
        raise BadRequest(f"{len(piece)} bytes at {offset} are no piece of an archive of {size} bytes")
    if offset == 0 and size > shutil.disk_usage(store).free:
        raise BadRequest(f"the {size} bytes of {name} do not fit on the disk of the model store")
    written = part.stat().st_size if part.exists() else 0
    if offset not in (0, written):
        raise BadRequest(f"the next piece of {name} begins at {written}, not at {offset}; start again")
    with part.open("ab" if offset else "wb") as file:
        file.write(piece)
    if offset + len(piece) < size:
        return False
    try:
        publish(part, target)
    finally:
        part.unlink(missing_ok=True)
    return True


def discard(store: Path, name: str) -> None:
    """Forget the pieces of an archive that is not complete."""
    check_name(name)
    (store / f".{name}{PART}").unlink(missing_ok=True)
