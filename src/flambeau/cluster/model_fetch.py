"""Files of models that a machine gets by itself: from the hub, or from a URL that the server allows."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flambeau.archive.unpack import unpack
from flambeau.errors import DownloadFailed
from flambeau.serving.model_sources.downloader import Downloader
from flambeau.wire.cluster_messages import FileInfo, RemoteFiles


class FetchFailed(Exception):
    """Why a machine could not get files by itself; the server sends them then."""


async def fetch(remote: RemoteFiles, files: Sequence[FileInfo], part: Path) -> list[str]:
    """Put the files that are found there into a folder; the paths of those. Raises FetchFailed."""
    wanted = [file for file in files if file.path.startswith(f"{remote.folder}/" if remote.folder else "")]
    try:
        if remote.hub:
            found = await asyncio.to_thread(fetch_from_hub, remote, wanted)
            return await asyncio.to_thread(take, found, remote.folder, wanted, part)
        with tempfile.TemporaryDirectory(prefix="fetched-", dir=part.parent) as folder:
            await fetch_archive(remote, Path(folder))
            return await asyncio.to_thread(take, Path(folder), remote.folder, wanted, part)
    except Exception as error:  # the hub's client raises errors of several libraries
        cause = error.cause if isinstance(error, DownloadFailed) else str(error)
        lines = cause.strip().splitlines() or [type(error).__name__]
        raise FetchFailed(f"{remote.shown}: {lines[0]}") from None


def fetch_from_hub(remote: RemoteFiles, files: Sequence[FileInfo]) -> Path:
    """The folder in the hub's cache of this machine, with these files."""
    import huggingface_hub

    repo, _, commit = remote.hub.partition("@")
    names = [relative(file.path, remote.folder) for file in files]
    return Path(huggingface_hub.snapshot_download(repo, revision=commit, allow_patterns=names, library_name="flambeau"))


async def fetch_archive(remote: RemoteFiles, folder: Path) -> None:
    """Download an archive and unpack it into the folder, with the server's limits of where it may come from."""
    allowed = [re.compile(pattern, re.IGNORECASE) for pattern in remote.allowed]
    downloader = Downloader(allowed, allow_private=remote.allow_private)
    with tempfile.TemporaryDirectory(prefix="archive-", dir=folder.parent) as place:
        if not downloader.allows(remote.url):
            raise FetchFailed("it matches no expression of allowed_urls")
        file = await downloader.download(remote.url, Path(place))
        await asyncio.to_thread(unpack, file, folder)


def take(found: Path, below: str, files: Sequence[FileInfo], part: Path) -> list[str]:
    """Link or copy files of the right size; the paths of those."""
    taken = []
    for file in files:
        source, target = found / relative(file.path, below), part / file.path
        if source.is_file() and source.stat().st_size == file.size:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source.resolve(), target)
            except OSError:  # another file system
                shutil.copyfile(source, target)
            taken.append(file.path)
    return taken


def relative(path: str, below: str) -> str:
    return path.removeprefix(f"{below}/") if below else path
