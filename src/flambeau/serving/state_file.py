"""StateFile: keeps the models of one server in a file, so that its next start has them again."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from flambeau.errors import ConfigError
from flambeau.serving.change_writer import ChangeWriter
from flambeau.serving.saved_models import SavedModel, read_document, to_document
from flambeau.serving.server import Server
from flambeau.small_files import read_small, write_synced

MAX_BYTES = 64 << 20  # some hundred bytes for each model


class StateFile:
    """A file that one server at a time holds; `models` are those that it had when it was opened."""

    def __init__(self, path: Path) -> None:
        """Lock and read the file; raises ConfigError if another server holds it, or it cannot be used."""
        self.path = path.resolve()  # a link stays
        self._draft = self.path.with_name(f".{self.path.name}.draft")
        self._lock = lock_beside(self.path)
        try:
            self._draft.unlink(missing_ok=True)  # of a server that was killed
            self.models: Sequence[SavedModel] = read_document(read_small(self.path, MAX_BYTES))
        except FileNotFoundError:
            self.models = ()
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"the state file {self.path} cannot be read: {error.strerror or error}") from None
        except ConfigError as error:
            os.close(self._lock)
            raise ConfigError(f"the state file {self.path} is not used: {error}") from None
        self._latest = b""
        self._is_saving = False
        self._server: Server | None = None
        self._writer: ChangeWriter[bytes] | None = None

    @property
    def has_registered(self) -> bool:
        """Whether it has models that were registered while a server ran."""
        return any(not saved.is_initial for saved in self.models)

    def follow(self, server: Server, wanted: Sequence[SavedModel]) -> None:
        """Save each change of the server's models, once they are restored; those that are wanted stay in the file."""
        server.not_restored = {saved.key: saved for saved in wanted}
        self._server = server
        self._writer = ChangeWriter(self._write, self.path)
        server.on_change = self.save
        server.change_saved = self._writer.written  # a change that was answered survives a crash

    def start_saving(self) -> None:
        """Save the models from now on: they, their defaults and percentages are those of the file again."""
        self._is_saving = True
        self.save()

    def save(self) -> None:
        """Queue the models as they are now, if they have changed."""
        if not self._is_saving:
            return
        assert self._server is not None
        assert self._writer is not None
        document = to_document(self._server.registry, [*self._server.not_restored.values()])
        if document != self._latest:
            self._latest = document
            self._writer.save(document)

    async def close(self) -> None:
        """Write what is queued, and let another server have the file."""
        if self._writer is not None:
            self.save()
            await self._writer.close()
        os.close(self._lock)

    def _write(self, document: bytes) -> None:
        if document is not self._latest:
            return  # a later one follows
        try:
            write_synced(self._draft, self.path, document)
        except OSError:
            self._latest = b""  # so that the next save writes it, changed or not
            raise


def lock_beside(path: Path) -> int:
    """The descriptor of a lock for the life of this process. The file itself is replaced, so it cannot hold it."""
    if path.is_dir() or not path.parent.is_dir():
        problem = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
        raise ConfigError(f"the state file {path} {problem}; name a file in an existing folder")
    file = path.with_name(f"{path.name}.lock")
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"the state file {path} cannot be locked with {file}: {error.strerror or error}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        text = f"another server uses the state file {path}; stop it, or give this one a file of its own"
        raise ConfigError(text) from None
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"the state file {path} cannot be locked with {file}: {error.strerror or error}") from None
    return descriptor
