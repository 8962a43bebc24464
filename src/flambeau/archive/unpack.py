"""Archive → folder, safely: whatever the archive says, nothing is written outside that folder or without bound."""

from __future__ import annotations

import gzip
import io
import os
import re
import shutil
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal

from flambeau.archive.manifest import MANIFEST, Manifest, parse_manifest, read_manifest
from flambeau.errors import ArchiveError, BrokenArchive, UnsafeArchive

CHUNK_BYTES = 256 << 10
# Neither a manifest nor one header of a tar has an honest reason to be larger.
MAX_HEADER_BYTES = 1 << 20
# Tensors full of zeros shrink well, so a high ratio says nothing about a small archive.
RATIO_FREE_BYTES = 100 << 20
# What the headers and the padding of one tar entry may add to its content.
TAR_OVERHEAD_BYTES = 4 << 10
MAX_DEPTH = 50
MAX_NAME_CHARACTERS = 4096
# As many as Linux follows before it gives up.
MAX_LINK_HOPS = 40

# What the standard library raises when the bytes of an archive make no sense; RuntimeError covers endless nesting.
READ_ERRORS = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    OverflowError,
    RuntimeError,
)

Kind = Literal["file", "folder", "link", "hard link", "special"]
Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackLimits:
    """How large an archive may become; the ratio of unpacked to packed counts above 100 MiB only."""

    max_entries: int = 10_000
    max_bytes: int = 200 << 30
    max_ratio: float = 1000


DEFAULT_LIMITS = UnpackLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file of an archive; gzip packs all files as one, so in a tar `packed_bytes` is a fair share."""

    name: str
    size_bytes: int
    packed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """One entry as either format tells it; in a tar it can be read only until the next one is asked for."""

    name: str
    kind: Kind
    size_bytes: int
    packed_bytes: int
    is_executable: bool
    target: str
    # None for what has no content.
    open: Callable[[], IO[bytes] | None]


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


def list_entries(archive: Path) -> list[Entry]:
    """List the files of an archive in its own order, folders left out."""
    items = [item for item in _items(archive, DEFAULT_LIMITS) if item.kind != "folder"]
    share = archive.stat().st_size / max(1, sum(item.size_bytes for item in items)) if _is_tar(archive) else None
    return [
        Entry(
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
    is_tar = _is_tar(archive_or_folder)
    wanted = safe_parts(MANIFEST)
    at_root, below_top, tops = None, None, set[str]()
    for item in _items(archive_or_folder, DEFAULT_LIMITS):
        parts = safe_parts(item.name)
        tops.update(parts[:1])
        if item.kind == "file" and parts == wanted:
            at_root = b"".join(_chunks(item, at_most=MAX_HEADER_BYTES))
        elif item.kind == "file" and is_tar and parts[1:] == wanted and below_top is None:
            below_top = b"".join(_chunks(item, at_most=MAX_HEADER_BYTES))
    content = at_root if at_root is not None or len(tops) > 1 else below_top
    return None if content is None else parse_manifest(content, f"{MANIFEST} of {archive_or_folder}")


# ── decisions ──


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


def excess(unpacked_bytes: int, packed_bytes: int, limits: UnpackLimits) -> str | None:
    """Say which limit an archive has outgrown, if it has."""
    if unpacked_bytes > limits.max_bytes:
        return f"it unpacks to more than {limits.max_bytes} bytes"
    if unpacked_bytes > RATIO_FREE_BYTES and unpacked_bytes > limits.max_ratio * packed_bytes:
        return f"it unpacks to more than {limits.max_ratio:g} times its own size"
    return None


# ── writing ──


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
    is_tar = _is_tar(archive)
    meter = _Meter(archive, limits)
    links: dict[Parts, str] = {}
    tops: set[str] = set()
    for item in _items(archive, limits):
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
    top = _wrapping_folder(tops, staging) if is_tar and tuple(tops) not in links else ()
    _write_links(staging.joinpath(*top), {parts[len(top) :]: target for parts, target in links.items()})
    return staging.joinpath(*top)


def _wrapping_folder(tops: set[str], staging: Path) -> Parts:
    # TorchServe drops the first folder of every tar entry; only one that all of them share is dropped here.
    # MAR-INF alone is an archive that has nothing but its manifest.
    is_wrapped = len(tops) == 1 and tops != {"MAR-INF"} and staging.joinpath(*tops).is_dir()
    return tuple(tops) if is_wrapped else ()


def _write(staging: Path, parts: Parts, item: _Item, meter: _Meter) -> None:
    path = staging.joinpath(*parts)
    folder = path if item.kind == "folder" else path.parent
    folder.mkdir(parents=True, exist_ok=True)
    if item.kind == "file":
        # Created anew (O_EXCL), with the permissions every new file gets: nothing is overwritten, no setuid survives.
        mode = 0o777 if item.is_executable else 0o666
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            for chunk in _chunks(item):
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


# ── reading ──


def _is_tar(archive: Path) -> bool:
    # Told by its first bytes: a suffix is only somebody's word for it.
    try:
        with archive.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise BrokenArchive(f"{archive} cannot be read: {error.strerror}") from error
    if magic not in (b"PK\x03\x04", b"PK\x05\x06") and not magic.startswith(b"\x1f\x8b"):
        raise BrokenArchive(f"{archive} is neither a zip nor a gzipped tar; is it complete, and is it a model archive?")
    return magic.startswith(b"\x1f\x8b")


def _items(archive: Path, limits: UnpackLimits) -> Iterator[_Item]:
    items = _tar_items(archive, limits) if _is_tar(archive) else _zip_items(archive)
    try:
        for count, item in enumerate(items, start=1):
            if count > limits.max_entries:
                raise UnsafeArchive(f"{archive} is refused: it has more than {limits.max_entries} entries.")
            yield item
    except READ_ERRORS as error:
        raise BrokenArchive(f"{archive} is damaged or cut short: {error}") from error


def _zip_items(archive: Path) -> Iterator[_Item]:
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            mode = info.external_attr >> 16
            # Most zips that were not made on Unix leave the kind of file empty.
            is_special = stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR)
            if info.flag_bits & 0x1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise BrokenArchive(
                    f"Entry {info.filename!r} of {archive} is neither stored nor deflated in the clear."
                )
            yield _Item(
                # The name before zipfile cuts it at the first null.
                name=info.orig_filename,
                kind="special" if is_special else "folder" if info.orig_filename.endswith("/") else "file",
                size_bytes=info.file_size,
                packed_bytes=info.compress_size,
                is_executable=bool(mode & stat.S_IXUSR),
                target="",
                open=partial(file.open, info),
            )


def _tar_items(archive: Path, limits: UnpackLimits) -> Iterator[_Item]:
    with gzip.open(archive) as unzipped:
        stream = _TarStream(unzipped, _Meter(archive, limits, overhead_bytes=limits.max_entries * TAR_OVERHEAD_BYTES))
        with tarfile.open(fileobj=stream, mode="r:") as file:
            for member in file:
                yield _Item(
                    name=member.name,
                    kind=_tar_kind(member),
                    size_bytes=member.size if member.isreg() else 0,
                    packed_bytes=0,
                    is_executable=bool(member.mode & stat.S_IXUSR),
                    target=member.linkname,
                    open=partial(file.extractfile, member),
                )
        stream.finish()


def _tar_kind(member: tarfile.TarInfo) -> Kind:
    if member.isreg():
        return "file"
    if member.isdir():
        return "folder"
    if member.issym():
        return "link"
    return "hard link" if member.islnk() else "special"


def _chunks(item: _Item, *, at_most: int | None = None) -> Iterator[bytes]:
    num_bytes = 0
    try:
        file = item.open()
        assert file is not None, "only files are read"
        with file:
            while chunk := file.read(CHUNK_BYTES):
                num_bytes += len(chunk)
                if at_most is not None and num_bytes > at_most:
                    raise UnsafeArchive(f"Entry {item.name!r} is refused: it is larger than {at_most} bytes.")
                yield chunk
    except READ_ERRORS as error:
        raise BrokenArchive(f"Entry {item.name!r} is damaged or cut short: {error}") from error


class _Meter:
    """Counts what an archive has really grown to; its headers are not asked."""

    def __init__(self, archive: Path, limits: UnpackLimits, *, overhead_bytes: int = 0) -> None:
        self._archive = archive
        self._packed_bytes = archive.stat().st_size
        self._limits = limits
        self._unpacked_bytes = -overhead_bytes

    def add(self, num_bytes: int, name: str = "") -> None:
        self._unpacked_bytes += num_bytes
        if problem := excess(self._unpacked_bytes, self._packed_bytes, self._limits):
            where = f" at entry {name!r}" if name else ""
            raise UnsafeArchive(f"{self._archive} is refused{where}: {problem}.")


class _TarStream(io.RawIOBase):
    """A gzipped tar as tarfile reads it, forward only; nothing in it can ask for much memory or hide its size."""

    def __init__(self, unzipped: gzip.GzipFile, meter: _Meter) -> None:
        self._unzipped = unzipped
        self._meter = meter
        self._position = 0
        self._last = b""

    def read(self, size: int = -1) -> bytes:
        # tarfile reads a whole header at once, however long it claims to be.
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise UnsafeArchive(f"The tar is refused: a header of {size} bytes is larger than {MAX_HEADER_BYTES}.")
        self._last = self._unzipped.read(size)
        self._position += len(self._last)
        self._meter.add(len(self._last))
        return self._last

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if offset < self._position:
            raise tarfile.StreamError("its parts are out of order")
        while self._position < offset and self.read(min(CHUNK_BYTES, offset - self._position)):
            pass
        return self._position

    def tell(self) -> int:
        return self._position

    def finish(self) -> None:
        """Read to the end, where gzip keeps its checksum."""
        # tarfile takes a header that makes no sense for the end; the true end is a block of zeros, or nothing.
        if self._last.strip(b"\0"):
            raise tarfile.ReadError("a header makes no sense")
        while self.read(CHUNK_BYTES):
            pass
