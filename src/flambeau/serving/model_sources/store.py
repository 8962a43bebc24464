"""Store: finds a model's files, unpacks archives and cleans up. Source: where a model's files are."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

from flambeau.archive.manifest import (
    CONFIG,
    MANIFEST,
    MODEL_SUFFIXES,
    Manifest,
    handler_of,
    manifest_of,
    read_config,
    read_manifest,
    requirements_in,
)
from flambeau.archive.unpack import unpack
from flambeau.errors import BrokenArchive, ConfigError, FileTaken, ModelNotFound
from flambeau.logs.line_formats import printable
from flambeau.serving.model_sources.downloader import Downloader, shown, sweep_parts
from flambeau.serving.model_sources.urls import (
    canonical,
    file_name_of,
    has_dots,
    is_allowed,
    is_hub_name,
    is_url,
    local_path_of,
)
from flambeau.wire.cluster_messages import RemoteFiles

logger = logging.getLogger(__name__)

ARCHIVE_SUFFIXES = (".mar", ".tar.gz", ".tgz")
PREFIX = "flambeau-models-"
SNAPSHOT = re.compile(r"/models--(?P<org>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")
MAX_SHOWN = 10  # files of a store in an error
NO_STORE = "start the server with --model-store FOLDER (config.properties: model_store), or with the model's path"


class Store:
    """The model store of one server, and the temporary folder of its unpacked archives."""

    def __init__(self, folder: Path | None, downloader: Downloader | None = None, *, exact_paths: bool = False) -> None:
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"the model store {folder} is not a folder; create it, or name another one")
        self.folder = folder.resolve() if folder else None
        self.downloader = downloader or Downloader((), allow_private=False)
        if self.folder is not None:
            sweep_parts(self.folder)
        self._exact_paths = exact_paths  # else of a path outside of the store only the name counts
        self._scratch: Path | None = None
        self._claims: list[int] = []  # locks of the scratch folder
        self._lock = threading.Lock()  # archives are unpacked in threads

    async def open(self, url: str, *, signed: bool = False, reuse: bool = False) -> Source:
        """The source that a registration names: in the store, in an allowed folder, or at an allowed URL.

        With `reuse`, a URL whose file is in the store already is not downloaded again.
        """
        folder = self._check(url)
        if self._exact_paths and not is_url(url) and "/" in url:
            url = self._locate(folder, url)
            if not is_url(url):
                return await asyncio.to_thread(self.open_path, Path(url), keep_broken=True)
        if not is_url(url):
            return await asyncio.to_thread(self._open_local, folder, url)
        if not self.downloader.allows(url):
            cause = (
                "--allow-url PATTERN (allowed_urls) allows those that match a regular expression, at the server's start"
            )
            raise ModelNotFound(f"Given URL {url} does not match any allowed URL(s)", cause=cause)
        if (place := _folder_at(url)) is not None:
            return await asyncio.to_thread(self._in_place, place, url)
        try:
            file = await self.downloader.download(url, folder, signed=signed)
        except FileTaken:
            if not reuse:
                raise
            logger.info("%s is in the model store already, and served from there", shown(url))
            return await asyncio.to_thread(self.open_path, folder / file_name_of(canonical(url)), url)
        try:
            source = await asyncio.to_thread(self.open_path, file, url, keep_broken=True)
            return replace(source, downloaded=file, remote=() if signed else self._remote(url))
        except BaseException:
            file.unlink(missing_ok=True)
            raise

    def _remote(self, url: str) -> tuple[RemoteFiles, ...]:
        """Where other machines may download an archive; a file of this machine is sent to them."""
        if not url.lower().startswith(("http:", "https:")) or not file_name_of(canonical(url)).endswith(
            ARCHIVE_SUFFIXES
        ):
            return ()
        allowed = [pattern.pattern for pattern in self.downloader.allowed]
        return (RemoteFiles(url=url, allowed=allowed, allow_private=self.downloader.allow_private),)

    def _check(self, url: str) -> Path:
        """Raise if the URL itself is not acceptable. Clients rely on the order of the checks."""
        if self.folder is None:
            if self._exact_paths and is_hub_name(url):
                cause = f"it is no model of this server, which has no model store; {hub_remedy(url, 'STORE')}"
                raise ModelNotFound(f"Model not found at: {url}", cause=f"{cause} on one with --model-store STORE")
            raise ModelNotFound("Model store has not been configured.", cause=NO_STORE)
        if not url:
            raise ModelNotFound("empty url")
        if ".." in url or (is_url(url) and has_dots(url)):
            raise ModelNotFound(f"Relative path is not allowed in url: {url}")
        return self.folder

    def _locate(self, folder: Path, url: str) -> str:
        """A path in the store, or the URL of an allowed one outside of it; raises ModelNotFound for any other."""
        path = folder / url  # an absolute one stays as it is
        try:
            if path.resolve().is_relative_to(folder) and path.exists():
                return str(path)
            if path.exists() and is_allowed(f"file://{path}", self.downloader.allowed):
                return f"file://{path}"
        except (OSError, ValueError):
            raise ModelNotFound(f"Model not found at: {url}") from None  # a name that the file system rejects
        if is_hub_name(url):
            cause = f"it is not in the model store; {hub_remedy(url, str(folder))}"
            raise ModelNotFound(f"Model not found at: {url}", cause=cause)
        remedy = f"copy it there and register {path.name}, or start the server with --allow-url 'file://{path}'"
        raise ModelNotFound(f"Model not found at: {url}", cause=f"it is not in the model store {folder}; {remedy}")

    def _open_local(self, folder: Path, url: str) -> Source:
        try:
            name = Path(url).name
            path = folder / name
            if name and path.resolve().is_relative_to(folder) and path.is_file():
                return self.open_path(path, url, keep_broken=True)
            own = Path(url).absolute()
            if own.is_dir() and is_allowed(f"file://{own}", self.downloader.allowed):
                return self._in_place(own, url)
            if name and path.resolve().is_relative_to(folder) and path.is_dir():
                return self._in_place(path, url)
            if (unpacked := unpacked_twin(path)) is not None and unpacked.resolve().is_relative_to(folder):
                logger.info("there is no %s; the folder %s is served", shown(url), unpacked.name)
                return self._in_place(unpacked, url)
        except (OSError, ValueError):
            raise ModelNotFound(f"Model not found at: {url}") from None  # a name that the file system rejects
        if own.is_dir():
            logger.warning(
                "%s is outside the model store; allowed_urls may allow it, as file://%s", shown(url), shown(str(own))
            )
        raise ModelNotFound(f"Model not found at: {url}", cause=f"the model store {folder} has {held_by(folder)}")

    def open_path(self, path: Path, url: str | None = None, *, keep_broken: bool = False) -> Source:
        """The source at a trusted path: an archive, a model folder, a model file, or a handler file.

        With `keep_broken` an archive that cannot be read becomes a source with a `problem` and without files.
        """
        url = url or path.name
        path = path.absolute()  # not resolved: a link's own name and neighbors count
        if path.is_dir():
            return self._in_place(path, url)
        if not path.is_file():
            raise ModelNotFound(f"Model not found at: {path}")
        if path.suffix == ".py":
            return Source(url=url, folder=path.parent, manifest=self._manifest_of_handler(path))
        target = self._new_folder()
        try:
            problem = self._fill(target, path, keep_broken=keep_broken)
            return Source(
                url=url,
                folder=target,
                manifest=read_manifest(target, f"{MANIFEST} of {path.name}"),
                is_temporary=True,
                origin=None if problem else Origin.of(path, target),
                problem=problem,
            )
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise

    def _manifest_of_handler(self, file: Path) -> Manifest | None:
        """The manifest of the folder that a handler file is in, with the file as the handler."""
        manifest = manifest_of(file.parent)
        if not self._exact_paths:  # TorchServe registers archives only
            return manifest
        if manifest is None:
            manifest = Manifest(model_name="", requirements_file=requirements_in(file.parent))
        return replace(manifest, model_name=file.stem, handler=file.name)

    @staticmethod
    def _fill(target: Path, path: Path, *, keep_broken: bool) -> str:
        """Put a model's files into its folder; return the problem with them, or an empty text."""
        try:
            fill(target, path)
        except BrokenArchive as error:
            if not keep_broken:
                raise
            text = printable(str(error))
            logger.error("%s. A model that is registered from it has no files, and its workers cannot start", text)
            return str(error)
        return ""

    def unpack(self, archive: Path) -> Path:
        """Unpack an archive of any kind into a new folder."""
        target = self._new_folder()
        try:
            unpack(archive, target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        return target

    def discard(self, source: Source) -> None:
        """Delete the unpacked and downloaded files of a model."""
        if source.is_temporary:
            shutil.rmtree(source.folder, ignore_errors=True)
        if source.downloaded is not None:
            source.downloaded.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete all unpacked files."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None
        while self._claims:
            os.close(self._claims.pop())

    @staticmethod
    def _in_place(path: Path, url: str) -> Source:
        inner = [*path.iterdir()]
        if len(inner) == 1 and inner[0].is_dir() and inner[0].name != Path(MANIFEST).parent.name:
            path = inner[0]
        return Source(url=url, folder=path, manifest=manifest_of(path), remote=hub_files(path))

    def _new_folder(self) -> Path:
        try:
            with self._lock:
                if self._scratch is None:
                    temporary = Path(tempfile.gettempdir())
                    sweep(temporary)
                    self._scratch = Path(tempfile.mkdtemp(prefix=PREFIX, dir=temporary))
                make_private(self._scratch)
                if not (self._scratch / "in-use").exists():
                    self._claims += filter(None, (claim(self._scratch), hold(self._scratch)))
            folder = self._scratch / "models" / uuid.uuid4().hex
            folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"archives cannot be unpacked: {error}; set TMPDIR to a writable folder") from None
        return folder


def hub_files(folder: Path) -> tuple[RemoteFiles, ...]:
    """The models of the hub that a folder is, or has links to, as the layout of the hub's cache tells."""
    found = []
    for path in (folder, *sorted(path for path in folder.iterdir() if path.is_symlink())):
        name = SNAPSHOT.search(path.resolve().as_posix())
        if name is not None and path.is_dir():
            below = "" if path == folder else path.name
            found.append(RemoteFiles(folder=below, hub=f"{name['org']}/{name['name']}@{name['commit']}"))
    return tuple(found)


def hub_remedy(url: str, store: str) -> str:
    """How to serve a model of the Hugging Face hub, which a registration does not download."""
    repository = url.partition("@")[0]
    name = Path(repository).name
    return (
        f"if it is a model of the Hugging Face hub, start the server with it (flambeau serve {url}), or download it "
        f"(hf download {repository} --local-dir {store}/{name}) and register {name}"
    )


def unpacked_twin(archive: Path) -> Path | None:
    """The folder that `--archive-format no-archive` creates instead of a .mar."""
    folder = archive.with_suffix("")
    return folder if archive.suffix == ".mar" and (folder / MANIFEST).is_file() else None


def _folder_at(url: str) -> Path | None:
    """The folder that a file URL names; None if it names none."""
    try:
        path = local_path_of(canonical(url)) if url.lower().startswith("file:") else None
        return path if path is not None and path.is_dir() else None
    except (OSError, ValueError):
        return None


def fill(folder: Path, path: Path) -> None:
    """Put the files of an archive, or links to a model file and its companions, into a folder."""
    if path.suffix in MODEL_SUFFIXES:
        wrap(path, folder)
    else:
        unpack(path, folder)


def wrap(file: Path, folder: Path) -> None:
    """Make a model folder for a single model file, with links to it and to its companions."""
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
    """The archives and model folders in a store."""
    return sorted(
        path
        for path in folder.iterdir()
        if (path.is_file() and path.name.endswith(ARCHIVE_SUFFIXES)) or (path / MANIFEST).is_file()
    )


def claim(folder: Path) -> int | None:
    """Lock a scratch folder for the life of this process; None if another process holds it."""
    return lock(folder / "in-use", os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)


def hold(folder: Path) -> int | None:
    """Lock a folder itself, which keeps systemd-tmpfiles from cleaning it up."""
    return lock(folder, os.O_RDONLY | os.O_DIRECTORY, fcntl.LOCK_SH)


def lock(path: Path, flags: int, kind: int) -> int | None:
    """The descriptor that holds the lock; None if it cannot be had."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def make_private(folder: Path) -> None:
    """Create a folder for this user alone. One that another user has put there is an OSError."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        state = folder.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user") from None


def sweep(temporary: Path) -> None:
    """Delete the scratch folders of killed servers: those that no process holds."""
    for folder in temporary.glob(f"{PREFIX}*"):
        if (folder / "in-use").is_file() and (fd := claim(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the files of a folder were unpacked from, so that they can be unpacked again."""

    path: Path
    files: tuple[str, ...]  # relative to the folder
    stamp: tuple[int, int]  # size and time of the archive, which may have been replaced since
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @classmethod
    def of(cls, path: Path, folder: Path) -> Origin:
        files = tuple(
            os.path.relpath(os.path.join(place, name), folder) for place, _, names in os.walk(folder) for name in names
        )
        return cls(path=path, files=files, stamp=stamp_of(path))

    def restore(self, folder: Path) -> None:
        """Unpack what is missing in the folder: systems delete old files below their temporary folder.

        Files that are there stay as they are, since other workers use them.
        """
        with self.lock:
            missing = [name for name in self.files if not os.path.lexists(folder / name)]
            if not missing and folder.is_dir():
                return
            self._check()
            logger.warning(
                "%d files below %s are gone; they are unpacked again from %s", len(missing), folder, self.path
            )
            make_private(folder.parents[1])  # the scratch folder of the store
            fresh = folder.parent / uuid.uuid4().hex
            fresh.mkdir(parents=True)
            try:
                fill(fresh, self.path)
                folder.mkdir(exist_ok=True)
                for name in missing:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(fresh / name, folder / name)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)

    def _check(self) -> None:
        text = f"its unpacked files were deleted, and {self.path}"
        if not self.path.is_file():
            raise ModelNotFound(f"{text} is gone too; register the model again")
        if self.path.suffix not in MODEL_SUFFIXES and stamp_of(self.path) != self.stamp:
            raise ModelNotFound(f"{text} has changed since; register the model again")


def stamp_of(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model came from and where its files are."""

    url: str
    folder: Path
    manifest: Manifest | None
    is_temporary: bool = False  # unpacked by this server, which deletes it
    downloaded: Path | None = None  # the file in the store, deleted with the model
    origin: Origin | None = None  # of unpacked files
    problem: str = ""  # why its archive could not be read
    remote: tuple[RemoteFiles, ...] = ()  # where other machines may get the files by themselves

    def restore(self) -> None:
        """Bring unpacked files back that were deleted."""
        if self.origin is not None:
            self.origin.restore(self.folder)


def held_by(folder: Path) -> str:
    """What can be registered from a store, for an error."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    more = f" and {len(names) - MAX_SHOWN} others" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more if names else "no files"
