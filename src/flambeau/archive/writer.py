"""Writes files and a manifest to a zip, a tar or a folder; a failure leaves no partial file."""

from __future__ import annotations

import io
import secrets
import shutil
import tarfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from zipfile import ZipFile  # by name, so that tests which patch zipfile do not change it

from flambeau.archive.manifest import MANIFEST


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a hidden file beside `path` that replaces it if the block succeeds."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            yield file
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_zip(
    file: IO[bytes],
    sources: Mapping[str, Path],
    manifest: bytes,
    *,
    is_deflated: bool = True,
    manifest_name: str = MANIFEST,
) -> None:
    method = zipfile.ZIP_DEFLATED if is_deflated else zipfile.ZIP_STORED
    # Zip has no dates before 1980; older files get its first day.
    with ZipFile(file, "w", method, strict_timestamps=False) as archive:
        archive.writestr(manifest_name, manifest)
        for name, source in sources.items():
            archive.write(source, name)


def write_tar(file: IO[bytes], top: str, sources: Mapping[str, Path], manifest: bytes) -> None:
    """Write a gzipped tar with everything below the folder `top`."""
    # Links are followed, as their targets are not packed.
    with tarfile.open(fileobj=file, mode="w:gz", dereference=True) as archive:
        header = tarfile.TarInfo(f"{top}/{MANIFEST}")
        header.size, header.mtime = len(manifest), int(time.time())
        archive.addfile(header, io.BytesIO(manifest))
        for name, source in sources.items():
            archive.add(source, f"{top}/{name}", recursive=False, filter=_anonymous)


def _anonymous(header: tarfile.TarInfo) -> tarfile.TarInfo:
    # Without the user and group of the packer.
    return header.replace(uid=0, gid=0, uname="", gname="", mode=header.mode & 0o755, deep=False)


def merge_into_folder(target: Path, sources: Mapping[str, Path], manifest: bytes) -> None:
    """Copy the files and the manifest into a folder; existing files are replaced."""
    was_there = target.exists()
    try:
        for name, source in sources.items():
            path = target / name
            if path.resolve() != source.resolve():
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(path) as copy, source.open("rb") as original:
                    shutil.copyfileobj(original, copy)
                path.chmod(source.stat().st_mode & 0o777)
        # The manifest is written last: a folder that has one is complete.
        (target / MANIFEST).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target / MANIFEST) as copy:
            copy.write(manifest)
    except BaseException:
        if not was_there:
            shutil.rmtree(target, ignore_errors=True)
        raise
