"""Recognizes the format of a model file by its content; the suffix is not used."""

from __future__ import annotations

import zipfile
from enum import Enum
from pathlib import Path

from flambeau.errors import HandlerError


class ModelFormat(Enum):
    """The formats of model files; the value is the name in error messages."""

    PICKLE = "a file written by torch.save"
    TORCHSCRIPT = "a TorchScript archive"
    EXPORTED = "a torch.export program"
    AOTI_PACKAGE = "an AOTInductor package"
    LIBRARY = "a native library"
    SAFETENSORS = "a safetensors file"
    ONNX = "an ONNX model"


WEIGHTS = (ModelFormat.PICKLE, ModelFormat.SAFETENSORS)  # the other formats hold the architecture too
DATA = (*WEIGHTS, ModelFormat.ONNX)  # the other formats are programs, or become Python source
SUPPORTED = (
    "TorchScript (.pt), torch.export programs and AOTInductor packages (.pt2), AOTInductor libraries (.so), "
    "ONNX (.onnx), and weights (.safetensors, .pt, .pth, .bin) with a model file"
)
_LEGACY_PICKLE = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # files of torch.save before it wrote zip files
_NATIVE = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
_OTHER_FORMATS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself: fetch it with `git lfs pull`"),
    (b"<!doctype html", "an HTML page: the download failed"),
    (b"<html", "an HTML page: the download failed"),
    (b"\x1f\x8b", "gzip: unpack it first"),
    (b"\x89hdf", "an HDF5 file, as Keras writes it"),
    (b"gguf", "a GGUF file"),
    (b"\x80", "a pickle that torch.save did not write"),
    (b"{", "a JSON document"),
)


def recognize(path: Path) -> ModelFormat:
    """The format of a file; the error for an unknown one says what it looks like and what is supported."""
    try:
        with path.open("rb") as file:
            head = file.read(1024)
    except OSError as error:
        reason = "it is not among the model's files" if isinstance(error, FileNotFoundError) else error.strerror
        raise HandlerError(f"{path.name} cannot be read: {reason}") from None
    if head.startswith(b"PK\x03\x04"):
        return _recognize_zip(path)
    if head.startswith(_LEGACY_PICKLE):
        return ModelFormat.PICKLE
    if head.startswith(_NATIVE):
        if head.startswith(b"\x7fELF\x02\x01") and _end_of_library(head) > path.stat().st_size:
            raise HandlerError(f"{path.name} looks like a truncated native library; copy or build it again")
        return ModelFormat.LIBRARY
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= path.stat().st_size - 8:
        return ModelFormat.SAFETENSORS
    if _may_be_onnx(head):
        return ModelFormat.ONNX
    raise HandlerError(f"{path.name} looks like {_describe(head)}; expected one of: {SUPPORTED}")


def _end_of_library(head: bytes) -> int:
    """The end of the section headers of a 64-bit ELF file. The loader does not check it and crashes later."""
    offset, size, count = (int.from_bytes(head[i:j], "little") for i, j in ((0x28, 0x30), (0x3A, 0x3C), (0x3C, 0x3E)))
    return offset + size * count


def _recognize_zip(path: Path) -> ModelFormat:
    """torch's formats are zip files with one top folder; tell them by the names in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[2] for name in archive.namelist()}
    except zipfile.BadZipFile:
        raise HandlerError(f"{path.name} looks like a truncated zip file; copy or save it again") from None
    if any(name.startswith("data/aotinductor/") for name in names):
        return ModelFormat.AOTI_PACKAGE
    if "archive_format" in names or any(name.startswith("models/") for name in names):
        return ModelFormat.EXPORTED
    if "constants.pkl" in names and any(name.startswith("code/") for name in names):
        return ModelFormat.TORCHSCRIPT
    if "data.pkl" in names:
        return ModelFormat.PICKLE
    raise HandlerError(f"{path.name} looks like a zip file that torch did not write; expected one of: {SUPPORTED}")


def _may_be_onnx(head: bytes) -> bool:
    """An ONNX file is a protobuf message: a small version number, then a string or the graph."""
    return len(head) > 3 and head[0] == 0x08 and 1 <= head[1] <= 32 and head[2] in (0x12, 0x1A, 0x22, 0x32, 0x3A, 0x42)


def _describe(head: bytes) -> str:
    if not head:
        return "an empty file"
    for beginning, name in _OTHER_FORMATS:
        if head.lstrip().lower().startswith(beginning):
            return name
    if all(byte in b"\t\n\r" or byte >= 32 for byte in head):
        return "text"
    return f"binary data of an unknown kind (it begins with {head[:8].hex(' ')})"
