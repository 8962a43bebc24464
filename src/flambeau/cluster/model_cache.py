"""ModelCache: the files of models on a machine of the cluster, by the digest of their contents."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from flambeau.cluster.model_fetch import FetchFailed, fetch
from flambeau.wire.cluster_messages import FileInfo, RemoteFiles
from flambeau.wire.model_files import digest_of, list_files

CACHE_VARIABLE = "FLAMBEAU_MODEL_CACHE"


class ModelCache:
    """A folder for each digest. It is filled beside, and renamed when it is complete."""

    def __init__(self, root: Path | None = None) -> None:
        named = os.environ.get(CACHE_VARIABLE)
        default = Path(tempfile.gettempdir()) / f"flambeau-models-{os.getuid()}"
        self._root = root or (Path(named) if named else default)

    def find(self, folder: str, files: Sequence[FileInfo], digest: str) -> str:
        """Where these files are: at the same path, or in the cache; empty if nowhere. It may take long."""
        if has_same(Path(folder), files):
            return folder
        if digest:
            cached = self._root / digest
            if cached.is_dir():
                return str(cached)
            if Path(folder).is_dir() and digest_of(Path(folder)) == digest:  # a copy with times of its own
                return folder
        return ""

    def new_part(self, digest: str) -> Path:
        """An empty folder to fill."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{digest}.", suffix=".part", dir=self._root))

    def complete(self, part: Path, digest: str) -> str:
        """Check what was filled and make it the folder of that digest."""
        if digest_of(part) != digest:
            shutil.rmtree(part, ignore_errors=True)
            raise ValueError("the files of the model arrived damaged, or have changed meanwhile")
        with suppress(OSError):  # another agent of this machine was faster
            part.rename(self._root / digest)
        shutil.rmtree(part, ignore_errors=True)
        return str(self._root / digest)


class ModelTransfer:
    """A model that is being received: fetched from where it came from, and in pieces from the server."""

    def __init__(self, cache: ModelCache, digest: str) -> None:
        self.held: list[str] = []  # the files that were fetched
        self.problem = ""  # why others were not
        self._cache = cache
        self._digest = digest
        self._part: Path | None = None
        self._pieces: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    async def fetch(self, remote: Sequence[RemoteFiles], files: Sequence[FileInfo]) -> str:
        """Get files without the server; the folder if that was all, and it is right."""
        if not remote:
            return ""
        part = self._part = await asyncio.to_thread(self._cache.new_part, self._digest)
        try:
            for one in remote:
                try:
                    self.held += await fetch(one, files, part)
                except FetchFailed as error:
                    self.problem = str(error)
            if len(self.held) < len(files):
                return ""
            return await asyncio.to_thread(self._cache.complete, part, self._digest)
        except ValueError:
            self.start_over()
            return ""
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
            raise

    def start_over(self) -> None:
        """What was fetched is something else; `complete` has deleted it."""
        self.held, self._part = [], None
        self.problem = "what it fetched differs from the server's files"

    def add(self, path: str, data: bytes) -> None:
        self._pieces.put_nowait((path, data))

    async def run(self) -> str:
        """Write the pieces until the last; the folder."""
        part = self._part
        if part is None:
            part = await asyncio.to_thread(self._cache.new_part, self._digest)
        try:
            while (piece := await self._pieces.get())[0]:
                await asyncio.to_thread(append, part, *piece)
            return await asyncio.to_thread(self._cache.complete, part, self._digest)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
            raise


def append(root: Path, path: str, data: bytes) -> None:
    """Append to a file below the folder; raises ValueError for any other path."""
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts or "\0" in path:
        raise ValueError(f"{path!r} is not a path inside of a model")
    target = root / relative
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "ab") as file:
        file.write(data)


def has_same(folder: Path, files: Sequence[FileInfo]) -> bool:
    """Whether a folder has these files, by size and time of change: a shared file system, or the same machine."""
    return folder.is_dir() and list_files(folder) == [*files]
