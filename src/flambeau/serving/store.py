"""Store: finds a model's files, unpacks archives into a folder of its own, and cleans up."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import threading
import uuid
from pathlib import Path

from flambeau.archive.folders import CONFIG, MODEL_SUFFIXES, handler_of, manifest_of, read_config
from flambeau.archive.manifest import MANIFEST, Manifest, read_manifest
from flambeau.archive.unpack import unpack
from flambeau.errors import ConfigError, ModelNotFound
from flambeau.serving.model import Source

ARCHIVE_SUFFIXES = (".mar", ".tar.gz", ".tgz")
PREFIX = "flambeau-models-"


class Store:
    """The model store of one server, and the temporary folder that holds what it unpacked."""

    def __init__(self, folder: Path | None) -> None:
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"the model store {folder} is not a folder; create it, or name another one")
        self.folder = folder.resolve() if folder else None
        self._scratch: Path | None = None
        self._claim: int | None = None  # the file that says that the scratch folder is in use
        self._lock = threading.Lock()  # archives are unpacked in threads

    def open(self, url: str) -> Source:
        """The model that a registration names by `url`: an archive or a folder in the store."""
        if self.folder is None:
            raise ModelNotFound("Model store has not been configured.")
        if not url:
            raise ModelNotFound("empty url")
        if ".." in url:
            raise ModelNotFound(f"Relative path is not allowed in url: {url}")
        if url.startswith(("http://", "https://", "file://")):
            raise ModelNotFound(f"Given URL {url} does not match any allowed URL(s)")
        name = Path(url).name
        path = self.folder / name
        if not name or not path.resolve().is_relative_to(self.folder) or not path.exists():
            raise ModelNotFound(f"Model not found at: {url}")
        return self.open_path(path, url)

    def open_path(self, path: Path, url: str | None = None) -> Source:
        """The model at a path the operator named: an archive, a model folder, a model file, or a handler file."""
        url = url or path.name
        path = path.absolute()  # not resolved: a link's name tells what it is, and its neighbours belong to it
        if path.is_dir():
            return self._in_place(path, url)
        if not path.is_file():
            raise ModelNotFound(f"Model not found at: {path}")
        if path.suffix == ".py":
            return Source(url=url, folder=path.parent, manifest=manifest_of(path.parent))
        target = self._new_folder()
        try:
            if path.suffix in MODEL_SUFFIXES:
                wrap(path, target)
            else:
                unpack(path, target)
            return Source(url=url, folder=target, manifest=read_manifest(target), is_temporary=True)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise

    def discard(self, source: Source) -> None:
        """Delete what was unpacked for a model."""
        if source.is_temporary:
            shutil.rmtree(source.folder, ignore_errors=True)

    def close(self) -> None:
        """Delete everything that was unpacked."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    @staticmethod
    def _in_place(path: Path, url: str) -> Source:
        inner = [*path.iterdir()]
        if len(inner) == 1 and inner[0].is_dir() and inner[0].name != Path(MANIFEST).parent.name:
            path = inner[0]
        return Source(url=url, folder=path, manifest=manifest_of(path))

    def _new_folder(self) -> Path:
        try:
            with self._lock:
                if self._scratch is None:
                    temporary = Path(tempfile.gettempdir())
                    sweep(temporary)
                    self._scratch = Path(tempfile.mkdtemp(prefix=PREFIX, dir=temporary))
                    self._claim = claim(self._scratch)
            folder = self._scratch / "models" / uuid.uuid4().hex
            folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"archives cannot be unpacked: {error}; set TMPDIR to a writable folder") from None
        return folder


def wrap(file: Path, folder: Path) -> None:
    """Make a model folder around a lone model file, with links to it and to what lies beside it for it."""
    beside = [file.parent / name for name in ("model.py", "index_to_name.json", CONFIG)]
    for path in (file, *beside):
        if path.is_file():
            (folder / path.name).symlink_to(path)
    is_described = (folder / CONFIG).exists()
    named = handler_of(read_config(folder)) if is_described else None
    manifest = Manifest(
        model_name=file.stem,
        handler=named or ("onnx" if file.suffix == ".onnx" else "base_handler"),
        serialized_file=file.name,
        model_file="model.py" if (folder / "model.py").exists() else None,
        config_file=CONFIG if is_described else None,
    )
    (folder / MANIFEST).parent.mkdir()
    (folder / MANIFEST).write_text(json.dumps(manifest.to_dict()))


def models_in(folder: Path) -> list[Path]:
    """The archives and model folders that lie in a store."""
    return sorted(
        path
        for path in folder.iterdir()
        if (path.is_file() and path.name.endswith(ARCHIVE_SUFFIXES)) or (path / MANIFEST).is_file()
    )


def claim(folder: Path) -> int | None:
    """Lock a scratch folder for as long as this process lives; None when somebody else has it."""
    try:
        fd = os.open(folder / "in-use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def sweep(temporary: Path) -> None:
    """Delete what servers that were killed left behind: scratch folders that nobody holds."""
    for folder in temporary.glob(f"{PREFIX}*"):
        if (folder / "in-use").is_file() and (fd := claim(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)
