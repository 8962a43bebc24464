"""FileStore: files of clients in a folder, each with a description beside it. It survives a restart.

All methods block; the event loop calls them in threads.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from pathlib import Path

import msgspec

from flambeau.errors import BadRequest

logger = logging.getLogger(__name__)

MAX_TOTAL_BYTES = 4 << 30
DESCRIPTION, CONTENT = ".json", ".data"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a file, as OpenAI's API has it, and whose it is."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    owner: str  # the name of the key that made it; empty: the server has no keys

    def document(self) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """Files by id. Descriptions are in memory; contents stay on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._files: dict[str, StoredFile] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(folder.glob(f"file-*{DESCRIPTION}")):
            try:
                found = msgspec.json.decode(path.read_bytes(), type=StoredFile)
            except (OSError, msgspec.DecodeError) as error:
                logger.warning("%s is not used: %s", path, error)
                continue
            if self._content(found.id).exists():
                self._files[found.id] = found

    def add(self, content: bytes | Path, *, filename: str, purpose: str, owner: str, now: float) -> StoredFile:
        """Keep bytes, or a file of the same folder, which is moved. Raises BadRequest if there is no room."""
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        with self._lock:
            total = sum(file.bytes for file in self._files.values())
            if total + size > MAX_TOTAL_BYTES:
                raise BadRequest(
                    f"the files of this server have {total} bytes, of {MAX_TOTAL_BYTES}; delete some first"
                )
            if isinstance(content, bytes) and size > shutil.disk_usage(self._folder).free:
                raise BadRequest(f"the {size} bytes of the file do not fit on the server's disk")
            id = f"file-{secrets.token_hex(16)}"
            stored = StoredFile(id=id, bytes=size, created_at=int(now), filename=filename, purpose=purpose, owner=owner)
            if isinstance(content, bytes):
                write_atomically(self._content(id), content)
            else:
                os.replace(content, self._content(id))
            write_atomically(self._folder / f"{id}{DESCRIPTION}", msgspec.json.encode(stored))
            self._files[id] = stored
        return stored

    def get(self, id: str, owner: str) -> StoredFile | None:
        """None for an unknown id, and for a file of another key."""
        found = self._files.get(id)
        return found if found is not None and found.owner == owner else None

    def of(self, owner: str) -> list[StoredFile]:
        """The files of a key, the newest first."""
        found = [file for file in self._files.values() if file.owner == owner]
        return sorted(found, key=lambda file: file.created_at, reverse=True)

    def read(self, file: StoredFile) -> bytes:
        return self._content(file.id).read_bytes()

    def delete(self, file: StoredFile) -> None:
        with self._lock:
            self._files.pop(file.id, None)
            (self._folder / f"{file.id}{DESCRIPTION}").unlink(missing_ok=True)
            self._content(file.id).unlink(missing_ok=True)

    def _content(self, id: str) -> Path:
        return self._folder / f"{id}{CONTENT}"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is either whole or as before, also if the machine stops."""
    fresh = path.with_name(f".{path.name}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(descriptor)
    os.replace(fresh, path)
