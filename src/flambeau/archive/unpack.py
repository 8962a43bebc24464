"""Archive → folder, safely: whatever the archive says, nothing is written outside that folder or without bound."""

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
# As many as Linux follows before it gives up.
MAX_LINK_HOPS = 40

Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedFile:
    """One file of an archive; gzip packs all files as one, so in a tar `packed_bytes` is a fair share."""

    name: str
    size_bytes: int
    packed_bytes: int


def unpack(archive: Path, into: Path, limits: UnpackLimits = DEFAULT_LIMITS) -> None:
    """Unpack a zip or a gzipped tar into a new or empty folder: all of it arrives, or nothing does."""
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
            with suppress(OSError):  # somebody else has put something there: theirs to keep
                into.rmdir()
        raise


def list_entries(archive: Path) -> list[ArchivedFile]:
    """List the files of an archive in its own order, folders left out."""
    items = [item for item in read_entries(archive, DEFAULT_LIMITS) if item.kind != "folder"]
    share = archive.stat().st_size / max(1, sum(item.size_bytes for item in items)) if is_tar(archive) else None
    return [
        ArchivedFile(
            name=item.name,
            size_bytes=item.size_bytes,
            packed_bytes=item.packed_bytes if share is None else round(item.size_bytes * share),
        )
        for item in items
    ]


def read_manifest_of(archive_or_folder: Path) -> Manifest | None:
    """Read the manifest of an archive or a folder without unpacking it; None when it has none."""
    if archive_or_folder.is_dir():
        return read_manifest(archive_or_folder)
    is_wrapped = is_tar(archive_or_folder)  # a tar may have a top folder around everything
    wanted = safe_parts(MANIFEST)
    at_root, below_top, tops = None, None, set[str]()
    for item in read_entries(archive_or_folder, DEFAULT_LIMITS):
        parts = safe_parts(item.name)
        tops.update(parts[:1])
        if item.kind == "file" and parts == wanted:
            at_root = b"".join(read_chunks(item, at_most=MAX_HEADER_BYTES))
        elif item.kind == "file" and is_wrapped and parts[1:] == wanted and below_top is None:
            below_top = b"".join(read_chunks(item, at_most=MAX_HEADER_BYTES))
    content = at_root if at_root is not None or len(tops) > 1 else below_top
    return None if content is None else parse_manifest(content, f"{MANIFEST} of {archive_or_folder}")


def safe_parts(name: str) -> Parts:
    """Split the name of an entry, refusing any that could lead out of the folder it is unpacked into."""
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
        problem = "it climbs out of its folder with '..'"
    elif len(parts) > MAX_DEPTH:
        problem = f"it lies more than {MAX_DEPTH} folders deep"
    if problem:
        raise UnsafeArchive(f"Entry {name!r} is refused: {problem}.")
    return parts


def leads_outside(link: Parts, links: Mapping[Parts, str]) -> bool:
    """Whether a link, followed through the archive's other links, leaves the root even for a moment or never ends."""
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
    # Everything is unpacked into a hidden folder first, so that a failure leaves nothing half done. It lies inside
    # the target because that is sure to be on the same disk.
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
    for item in read_entries(archive, limits):
        parts = safe_parts(item.name)
        if not parts:  # "./", the root itself
            if item.kind != "folder":
                raise UnsafeArchive(f"Entry {item.name!r} is refused: it would take the place of the folder.")
            continue
        tops.add(parts[0])
        with _naming(item.name):
            if item.kind == "link":
                # Links come last: while files are being written there is none that they could be written through.
                if parts in links:
                    raise FileExistsError
                links[parts] = item.target
            else:
                _write(staging, parts, item, meter)
    top = _wrapping_folder(tops, staging) if may_be_wrapped and tuple(tops) not in links else ()
    _write_links(staging.joinpath(*top), {parts[len(top) :]: target for parts, target in links.items()})
    return staging.joinpath(*top)


def _wrapping_folder(tops: set[str], staging: Path) -> Parts:
    # TorchServe drops the first folder of every tar entry; only one that all of them share is dropped here.
    # MAR-INF alone is an archive that has nothing but its manifest.
    is_wrapped = len(tops) == 1 and tops != {"MAR-INF"} and staging.joinpath(*tops).is_dir()
    return tuple(tops) if is_wrapped else ()


def _write(staging: Path, parts: Parts, item: ArchiveEntry, meter: UnpackMeter) -> None:
    path = staging.joinpath(*parts)
    folder = path if item.kind == "folder" else path.parent
    folder.mkdir(parents=True, exist_ok=True)
    if item.kind == "file":
        # Created anew (O_EXCL), with the permissions every new file gets: nothing is overwritten, no setuid survives.
        mode = 0o777 if item.is_executable else 0o666
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            for chunk in read_chunks(item):
                meter.add(len(chunk), item.name)
                file.write(chunk)
    elif item.kind == "hard link":
        source = staging.joinpath(*safe_parts(item.target))
        if not source.is_file():
            raise UnsafeArchive(f"Entry {item.name!r} is refused: it links to {item.target!r}, no file before it.")
        os.link(source, path)
    elif item.kind == "special":
        raise UnsafeArchive(f"Entry {item.name!r} is refused: it is a device, a pipe or a symbolic link in a zip.")


def _write_links(root: Path, links: Mapping[Parts, str]) -> None:
    for parts, target in links.items():
        name = "/".join(parts)
        if leads_outside(parts, links):
            raise UnsafeArchive(f"Entry {name!r} is refused: its link to {target[:100]!r} leads outside or nowhere.")
        if any(parts[:length] in links for length in range(1, len(parts))):
            raise UnsafeArchive(f"Entry {name!r} is refused: it lies behind a link.")
    for parts, target in links.items():
        with _naming("/".join(parts)):
            path = root.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise UnsafeArchive(f"Entry {name!r} is refused: another entry has taken its name.") from error
    except OSError as error:
        raise ArchiveError(f"Entry {name!r} cannot be written: {error.strerror}") from error


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
