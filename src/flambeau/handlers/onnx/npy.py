"""NumPy's .npy and .npz bytes ↔ arrays. Safe for untrusted input: no pickles, no unbounded sizes."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Mapping
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from flambeau.errors import BadRequest

Array = np.ndarray[Any, np.dtype[Any]]

NPY_MAGIC = b"\x93NUMPY"
NPZ_MAGIC = b"PK"
MAX_HEADER_BYTES = 16_384
HEADER_READERS = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}


def is_npy(raw: bytes | bytearray) -> bool:
    return raw[: len(NPY_MAGIC)] == NPY_MAGIC


def is_npz(raw: bytes | bytearray) -> bool:
    return raw[: len(NPZ_MAGIC)] == NPZ_MAGIC


def read_npy(raw: bytes | bytearray) -> Array:
    """The array of a .npy file as a view of its bytes; a false size in the header allocates nothing."""
    header = io.BytesIO(bytes(raw[:MAX_HEADER_BYTES]))
    try:
        version = npy_format.read_magic(header)
        if version not in HEADER_READERS:
            raise ValueError(f"version {version[0]}.{version[1]} of the format is not supported")
        shape, is_fortran, dtype = HEADER_READERS[version](header)
        if dtype.hasobject:
            raise ValueError("it holds Python objects, which are never unpickled")
        flat: Array = np.frombuffer(raw, dtype, count=math.prod(shape), offset=header.tell())
        return flat.reshape(shape, order="F" if is_fortran else "C")
    except (ValueError, OverflowError, TypeError, SyntaxError, TokenError) as error:
        raise BadRequest(f"the .npy data cannot be read: {error}; write it with numpy.save") from None


MAX_ARRAYS = 10_000


def read_npz(raw: bytes | bytearray, max_bytes: int) -> dict[str, Array]:
    """The arrays of a .npz file by name; files that unpack to more than `max_bytes` are rejected before reading."""
    if raw.count(b"PK\x01\x02") > MAX_ARRAYS:  # every entry has this mark; zipfile would parse all of them
        raise BadRequest(f"the .npz data holds more than {MAX_ARRAYS} arrays")
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            entries = archive.infolist()
            if (size := sum(entry.file_size for entry in entries)) > max_bytes:
                raise BadRequest(f"the .npz data unpacks to {size} bytes; max_unpacked_bytes is {max_bytes}")
            return {entry.filename.removesuffix(".npy"): read_npy(read_entry(archive, entry)) for entry in entries}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise BadRequest(f"the .npz data cannot be read: {error}; write it with numpy.savez") from None


def read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """The bytes of an entry, at most as many as it declares."""
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # other methods unpack without a bound
        raise ValueError("it is compressed in a way that numpy.savez does not use")
    with archive.open(entry) as file:
        return file.read(entry.file_size)


def write_npy(array: Array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def write_npz(arrays: Mapping[str, Array]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:  # unlike numpy.savez, zipfile accepts any name
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", write_npy(array))
    return buffer.getvalue()
