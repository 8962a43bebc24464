"""Reads the entries of a zip or gzipped tar, in order. Sizes in headers are not trusted."""

from __future__ import annotations

import gzip
import io
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal

from flambeau.errors import BrokenArchive, UnsafeArchive

CHUNK_BYTES = 256 << 10
# Valid manifests and tar headers are smaller.
MAX_HEADER_BYTES = 1 << 20
# The ratio is not checked below this size: tensors of zeros compress well.
RATIO_FREE_BYTES = 100 << 20
DIRECTORY_ENTRY_BYTES = 1 << 10  # of a zip's directory, on average; most are much shorter
DIRECTORY_MARK = b"PK\x01\x02"  # every entry of the directory begins with it
# Headers and padding of one tar entry.
TAR_OVERHEAD_BYTES = 4 << 10

# Raised by the standard library for damaged archives; RuntimeError covers RecursionError.
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

EntryKind = Literal["file", "folder", "link", "hard link", "special"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackLimits:
    """Limits of an unpacked archive. `max_ratio` is unpacked to packed size, checked above 100 MiB."""

    max_entries: int = 10_000
    max_bytes: int = 200 << 30
    max_ratio: float = 1000


DEFAULT_LIMITS = UnpackLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveEntry:
    """One entry of a zip or a tar. An entry of a tar must be read before the iterator advances."""

    name: str
    kind: EntryKind
    size_bytes: int
    packed_bytes: int
    is_executable: bool
    target: str
    open: Callable[[], IO[bytes] | None]  # returns None for an entry without content


def exceeded_limit(unpacked_bytes: int, packed_bytes: int, limits: UnpackLimits) -> str | None:
    """The limit that an archive exceeds, as text; None if it exceeds none."""
    if unpacked_bytes > limits.max_bytes:
        return f"it unpacks to more than {limits.max_bytes} bytes"
    if unpacked_bytes > RATIO_FREE_BYTES and unpacked_bytes > limits.max_ratio * packed_bytes:
        return f"it unpacks to more than {limits.max_ratio:g} times its own size"
    return None


def is_tar(archive: Path) -> bool:
    """Whether an archive is a gzipped tar, by its first bytes; an error if it is neither tar nor zip."""
    try:
        with archive.open("rb") as file:
            begin = file.read(64)
    except OSError as error:
        raise BrokenArchive(f"{archive} cannot be read: {error.strerror}") from error
    if not begin.startswith((b"PK\x03\x04", b"PK\x05\x06", b"\x1f\x8b")):
        raise BrokenArchive(f"{archive} is neither a zip nor a gzipped tar; {explain_content(begin)}")
    return begin.startswith(b"\x1f\x8b")


def explain_content(begin: bytes) -> str:
    """What a file that is no archive is, by its first bytes, and what to do."""
    if not begin:
        return "it is empty: copy or download it again"
    if begin.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer: fetch the file itself with `git lfs pull`"
    if begin.lstrip()[:5].lower() in (b"<html", b"<!doc", b"<?xml"):
        return "it is a page of a web site: download it with the address of the file itself"
    return "is it complete, and is it a model archive?"


def read_entries(archive: Path, limits: UnpackLimits) -> Iterator[ArchiveEntry]:
    """Yield the entries of an archive in their order; too many are an error."""
    entries = _tar_entries(archive, limits) if is_tar(archive) else _zip_entries(archive, limits)
    try:
        for count, entry in enumerate(entries, start=1):
            if count > limits.max_entries:
                raise too_many_entries(archive, limits)
            yield entry
    except READ_ERRORS as error:
        raise BrokenArchive(f"{archive} is damaged or truncated: {error}") from error


def too_many_entries(archive: Path, limits: UnpackLimits) -> UnsafeArchive:
    return UnsafeArchive(f"{archive} is rejected: it has more than {limits.max_entries} entries.")


class _ZipDirectory(io.FileIO):
    """The file that zipfile opens. It reads the directory at once, whatever its size, and parses all of its entries."""

    def __init__(self, archive: Path, limits: UnpackLimits) -> None:
        super().__init__(archive)
        self._archive = archive
        self._limits = limits
        self.is_checked = False

    def read(self, size: int | None = -1) -> bytes:
        size = -1 if size is None else size
        if self.is_checked:
            return super().read(size) or b""
        is_long = size > self._limits.max_entries * DIRECTORY_ENTRY_BYTES
        content = b"" if is_long else super().read(size) or b""
        if is_long or content.count(DIRECTORY_MARK) > self._limits.max_entries:
            raise too_many_entries(self._archive, self._limits)
        return content


def _zip_entries(archive: Path, limits: UnpackLimits) -> Iterator[ArchiveEntry]:
    with _ZipDirectory(archive, limits) as directory, zipfile.ZipFile(directory) as file:
        directory.is_checked = True
        for info in file.infolist():
            mode = info.external_attr >> 16
            # Zips that were not made on Unix have no file type.
            is_special = stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR)
            if info.flag_bits & 0x1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise BrokenArchive(
                    f"Entry {info.filename!r} of {archive} is encrypted, or neither stored nor deflated."
                )
            yield ArchiveEntry(
                # zipfile truncates `filename` at the first null character.
                name=info.orig_filename,
                kind="special" if is_special else "folder" if info.orig_filename.endswith("/") else "file",
                size_bytes=info.file_size,
                packed_bytes=info.compress_size,
                is_executable=bool(mode & stat.S_IXUSR),
                target="",
                open=partial(file.open, info),
            )


def _tar_entries(archive: Path, limits: UnpackLimits) -> Iterator[ArchiveEntry]:
    with gzip.open(archive) as unzipped:
        stream = _TarStream(
            unzipped, UnpackMeter(archive, limits, overhead_bytes=limits.max_entries * TAR_OVERHEAD_BYTES)
        )
        with tarfile.open(fileobj=stream, mode="r:") as file:
            for member in file:
                yield ArchiveEntry(
                    name=member.name,
                    kind=_tar_kind(member),
                    size_bytes=member.size if member.isreg() else 0,
                    packed_bytes=0,
                    is_executable=bool(member.mode & stat.S_IXUSR),
                    target=member.linkname,
                    open=partial(file.extractfile, member),
                )
        stream.finish()


def _tar_kind(member: tarfile.TarInfo) -> EntryKind:
    if member.isreg():
        return "file"
    if member.isdir():
        return "folder"
    if member.issym():
        return "link"
    return "hard link" if member.islnk() else "special"


def read_chunks(entry: ArchiveEntry, *, at_most: int | None = None) -> Iterator[bytes]:
    """Yield the content of a file entry in chunks; more than `at_most` bytes are an error."""
    num_bytes = 0
    try:
        file = entry.open()
        assert file is not None, "only files are read"
        with file:
            while chunk := file.read(CHUNK_BYTES):
                num_bytes += len(chunk)
                if at_most is not None and num_bytes > at_most:
                    raise UnsafeArchive(f"Entry {entry.name!r} is rejected: it is larger than {at_most} bytes.")
                yield chunk
    except READ_ERRORS as error:
        raise BrokenArchive(f"Entry {entry.name!r} is damaged or truncated: {error}") from error


class UnpackMeter:
    """Counts the bytes that were really unpacked."""

    def __init__(self, archive: Path, limits: UnpackLimits, *, overhead_bytes: int = 0) -> None:
        self._archive = archive
        self._packed_bytes = archive.stat().st_size
        self._limits = limits
        self._unpacked_bytes = -overhead_bytes

    def add(self, num_bytes: int, name: str = "") -> None:
        """Count unpacked bytes; raise UnsafeArchive if a limit is exceeded."""
        self._unpacked_bytes += num_bytes
        if problem := exceeded_limit(self._unpacked_bytes, self._packed_bytes, self._limits):
            where = f" at entry {name!r}" if name else ""
            raise UnsafeArchive(f"{self._archive} is rejected{where}: {problem}.")


class _TarStream(io.RawIOBase):
    """The stream that tarfile reads: forward only, with limits on header size and total size."""

    def __init__(self, unzipped: gzip.GzipFile, meter: UnpackMeter) -> None:
        self._unzipped = unzipped
        self._meter = meter
        self._position = 0
        self._last = b""

    def read(self, size: int = -1) -> bytes:
        # tarfile reads a header of any declared size at once.
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise UnsafeArchive(f"The tar is rejected: a header of {size} bytes is larger than {MAX_HEADER_BYTES}.")
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
        """Read to the end, where gzip has its checksum."""
        # tarfile stops at an invalid header without an error; the real end is a block of zeros or nothing.
        if self._last.strip(b"\0"):
            raise tarfile.ReadError("a header is invalid")
        while self.read(CHUNK_BYTES):
            pass
