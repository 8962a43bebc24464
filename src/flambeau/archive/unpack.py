"""Unpacks archives safely: nothing is written outside of the target folder or beyond the limits."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flambeau.archive.manifest import MANIFEST, Manifest, parse_manifest, read_manifest
from flambeau.archive.reader import (
    DEFAULT_LIMITS,
    MAX_HEADER_BYTES,
    ArchiveEntry,
    UnpackLimits,
    UnpackMeter,
    is_tar,
    read_chunks,
    read_entries,
)
from flambeau.errors import ArchiveError, UnsafeArchive

MAX_DEPTH = 50
MAX_NAME_CHARACTERS = 4096
MAX_LINK_HOPS = 40  # as in Linux

Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedFile:
    """A file in a listing; in a tar, `packed_bytes` is a share of the whole, as gzip packs all files together."""

    name: str
    size_bytes: int
    packed_bytes: int


def unpack(archive: Path, into: Path, limits: UnpackLimits = DEFAULT_LIMITS) -> None:
    """Unpack a zip or a gzipped tar into a new or empty folder, completely or not at all."""
    was_there = into.exists()
    staging, arrived = _stage(into), list[Path]()
    try:
        for child in sorted(_fill(staging, archive, limits).iterdir()):
            arrived.append(child.rename(into / child.name))
        shutil.rmtree(staging)
    except BaseException:
        for path in [staging, *arrived]:
            _remove(path)
        if not was_there:
            with suppress(OSError):  # another process has put files there
                into.rmdir()
        raise


def list_entries(archive: Path) -> list[ArchivedFile]:
    """The files of an archive in their order, without folders."""
    entries = [entry for entry in read_entries(archive, DEFAULT_LIMITS) if entry.kind != "folder"]
    share = archive.stat().st_size / max(1, sum(entry.size_bytes for entry in entries)) if is_tar(archive) else None
    return [
        ArchivedFile(
            name=entry.name,
            size_bytes=entry.size_bytes,
            packed_bytes=entry.packed_bytes if share is None else round(entry.size_bytes * share),
        )
        for entry in entries
    ]


def read_manifest_of(archive_or_folder: Path) -> Manifest | None:
    """Read the manifest of an archive or a folder without unpacking it; None if it has none."""
    if archive_or_folder.is_dir():
        return read_manifest(archive_or_folder)
    is_wrapped = is_tar(archive_or_folder)  # a tar may have one top folder around everything
    wanted = safe_parts(MANIFEST)
    at_root, below_top, tops = None, None, set[str]()
    for entry in read_entries(archive_or_folder, DEFAULT_LIMITS):
        parts = safe_parts(entry.name)
        tops.update(parts[:1])
        if entry.kind == "file" and parts == wanted:
            at_root = b"".join(read_chunks(entry, at_most=MAX_HEADER_BYTES))
        elif entry.kind == "file" and is_wrapped and parts[1:] == wanted and below_top is None:
            below_top = b"".join(read_chunks(entry, at_most=MAX_HEADER_BYTES))
    content = at_root if at_root is not None or len(tops) > 1 else below_top
    return None if content is None else parse_manifest(content, f"{MANIFEST} of {archive_or_folder}")


def safe_parts(name: str) -> Parts:
    """Split the name of an entry; reject names that could lead out of the target folder."""
    problem = None
    if len(name) > MAX_NAME_CHARACTERS:
        name, problem = name[:100] + "…", f"its name is longer than {MAX_NAME_CHARACTERS} characters"
    elif not name:
        problem = "it has no name"
    elif name.startswith("/"):
        problem = "its path is absolute"
    elif re.match(r"[A-Za-z]:", name):
        problem = "its path starts with a drive letter"
    elif "\\" in name or "\0" in name:
        problem = "its name has a backslash or a null in it; write paths with /"
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        problem = "its path contains '..'"
    elif len(parts) > MAX_DEPTH:
        problem = f"its path has more than {MAX_DEPTH} folders"
    if problem:
        raise UnsafeArchive(f"Entry {name!r} is rejected: {problem}.")
    return parts


def leads_outside(link: Parts, links: Mapping[Parts, str]) -> bool:
    """Whether a link, followed through the archive's other links, leaves the root at any step or does not end."""
    here, ahead = list(link[:-1]), [link[-1]]
    hops = 0
    while ahead:
        part = ahead.pop()
        if part == "..":
            if not here:
                return True
            here.pop()
        elif part not in ("", "."):
            here.append(part)
            target = links.get(tuple(here))
            if target is not None:
                hops += 1
                if hops > MAX_LINK_HOPS or len(target) > MAX_NAME_CHARACTERS:
                    return True
                if re.match(r"/|[A-Za-z]:", target) or "\\" in target:
                    return True
                here.pop()
                ahead.extend(reversed(target.split("/")))
    return False


def _stage(into: Path) -> Path:
    # Everything is unpacked into a hidden folder first, so that a failure leaves no partial result. It is inside of
    # the target, so that it is on the same file system.
    try:
        into.mkdir(parents=True, exist_ok=True)
        if any(into.iterdir()):
            raise ArchiveError(f"{into} is not empty; unpack into a new or an empty folder.")
        return Path(tempfile.mkdtemp(prefix=".unpacking-", dir=into))
    except OSError as error:
        raise ArchiveError(f"Cannot unpack into {into}: {error.strerror}") from error


def _fill(staging: Path, archive: Path, limits: UnpackLimits) -> Path:
    """Write every entry below `staging` and return the folder that is the root of the archive."""
    may_be_wrapped = is_tar(archive)
    meter = UnpackMeter(archive, limits)
    links: dict[Parts, str] = {}
    tops: set[str] = set()
    for entry in read_entries(archive, limits):
        parts = safe_parts(entry.name)
        if not parts:  # "./", the root itself
            if entry.kind != "folder":
                raise UnsafeArchive(f"Entry {entry.name!r} is rejected: it would replace the target folder.")
            continue
        tops.add(parts[0])
        with _errors_for(entry.name):
            if entry.kind == "link":
                # Links are created last, so that no file is written through a link.
                if parts in links:
                    raise FileExistsError
                links[parts] = entry.target
            else:
                _write(staging, parts, entry, meter)
    top = _wrapping_folder(tops, staging) if may_be_wrapped and tuple(tops) not in links else ()
    _write_links(staging.joinpath(*top), {parts[len(top) :]: target for parts, target in links.items()})
    return staging.joinpath(*top)


def _wrapping_folder(tops: set[str], staging: Path) -> Parts:
    # A top folder is dropped only if all entries share it. MAR-INF alone is an archive with nothing but a manifest.
    is_wrapped = len(tops) == 1 and tops != {"MAR-INF"} and staging.joinpath(*tops).is_dir()
    return tuple(tops) if is_wrapped else ()


def _write(staging: Path, parts: Parts, entry: ArchiveEntry, meter: UnpackMeter) -> None:
    path = staging.joinpath(*parts)
    folder = path if entry.kind == "folder" else path.parent
    folder.mkdir(parents=True, exist_ok=True)
    if entry.kind == "file":
        # O_EXCL and default permissions: nothing is overwritten, and setuid bits are dropped.
        mode = 0o777 if entry.is_executable else 0o666
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            for chunk in read_chunks(entry):
                meter.add(len(chunk), entry.name)
                file.write(chunk)
    elif entry.kind == "hard link":
        source = staging.joinpath(*safe_parts(entry.target))
        if not source.is_file():
            raise UnsafeArchive(
                f"Entry {entry.name!r} is rejected: its hard link target {entry.target!r} is not a file before it."
            )
        os.link(source, path)
    elif entry.kind == "special":
        raise UnsafeArchive(f"Entry {entry.name!r} is rejected: it is a device, a pipe or a symbolic link in a zip.")


def _write_links(root: Path, links: Mapping[Parts, str]) -> None:
    for parts, target in links.items():
        name = "/".join(parts)
        if leads_outside(parts, links):
            raise UnsafeArchive(
                f"Entry {name!r} is rejected: its link to {target[:100]!r} leads outside or does not end."
            )
        if any(parts[:length] in links for length in range(1, len(parts))):
            raise UnsafeArchive(f"Entry {name!r} is rejected: it is below a link.")
    for parts, target in links.items():
        with _errors_for("/".join(parts)):
            path = root.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)


@contextmanager
def _errors_for(name: str) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise UnsafeArchive(f"Entry {name!r} is rejected: another entry has the same name.") from error
    except OSError as error:
        raise ArchiveError(f"Entry {name!r} cannot be written: {error.strerror}") from error


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
