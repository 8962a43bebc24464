"""Weight files: where they are in a folder, and their tensors, mapped into memory instead of read."""

from __future__ import annotations

import json
import logging
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flambeau.llm.errors import CheckpointError, LLMError, NoRoom
from flambeau.llm.json_files import read_object

logger = logging.getLogger(__name__)

KNOWN_FILES = (  # the first that exists is used
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "model.pth",
    "consolidated.00.pth",
    "consolidated.safetensors.index.json",
    "consolidated.safetensors",
)
MISTRAL_PART = re.compile(r"consolidated-\d+-of-\d+\.safetensors")  # its shards may come without an index
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file that is not read yet."""

    file: WeightFile
    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """The tensor on the CPU, mapped: its pages are read when they are used."""
        return self.file.read(self.name)


class WeightFile(Protocol):
    """A file with tensors by name."""

    path: Path

    def __iter__(self) -> Iterator[StoredTensor]:
        """The tensors in the order of the file; no weights are read."""

    def read(self, name: str) -> Tensor:
        """The tensor of this name."""


class SafetensorsFile:
    """A .safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: dict[str, int] = {}  # read when they are needed
        try:
            self._file: Any = safe_open(str(path), framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError, MemoryError) as error:
            raise unreadable(path, error) from error

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file's header says beside its tensors."""
        return self._file.metadata() or {}

    def __iter__(self) -> Iterator[StoredTensor]:
        """The tensors in the order of the file, so that it is read from front to back."""
        for name in self._file.offset_keys():
            header = self._file.get_slice(name)
            kind = header.get_dtype()
            if kind not in TYPES:
                raise CheckpointError(f"{name} in {self.path} has the type {kind}, which is not supported")
            yield StoredTensor(self, name, torch.Size(header.get_shape()), TYPES[kind])

    def read(self, name: str) -> Tensor:
        """A tensor mapped from the file."""
        return self._file.get_tensor(name)  # type: ignore[no-any-return]

    def offset(self, name: str) -> int:
        """Where the bytes of a tensor begin."""
        if not self._offsets:
            with self.path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            self._offsets = {key: 8 + size + entry["data_offsets"][0] for key, entry in header.items()}
        return self._offsets[name]


class TorchFile:
    """A .bin, .pt or .pth file of tensors by name; files with anything else are rejected."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:  # files from before torch 1.6 are not zip files and cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path} holds other things than tensors, or is damaged; save its state_dict again, best as safetensors"
            ) from error
        except (RuntimeError, OSError, EOFError, ValueError, MemoryError) as error:
            raise unreadable(path, error) from error
        if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
            raise CheckpointError(f"{path} must hold a state_dict: tensors by name")
        self._tensors: Mapping[str, Tensor] = content

    def __iter__(self) -> Iterator[StoredTensor]:
        """The tensors in the order in which they were saved."""
        for name, tensor in self._tensors.items():
            yield StoredTensor(self, name, tensor.shape, tensor.dtype)

    def read(self, name: str) -> Tensor:
        """A tensor mapped from the file if possible."""
        return self._tensors[name].detach()


def open_weights(path: Path) -> list[WeightFile]:
    """The files of a checkpoint: a folder, or one file."""
    return [SafetensorsFile(p) if p.suffix == ".safetensors" else TorchFile(p) for p in weight_paths(path)]


def weight_paths(path: Path) -> list[Path]:
    """The weight files of a folder, or the file itself."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; name the folder of a checkpoint or one of its files")
    found = [name for name in KNOWN_FILES if (path / name).is_file()]
    if found:
        paths = indexed_paths(path / found[0]) if found[0].endswith(".json") else [path / found[0]]
        warn_of_newer(paths, [path / name for name in found[1:] if not name.endswith(".json")])
        return paths
    others = sorted(path.glob("*.safetensors"))
    are_parts = bool(others) and all(MISTRAL_PART.fullmatch(other.name) for other in others)
    if are_parts:
        check_parts(others)
    elif len(others) != 1:
        raise CheckpointError(
            f"{path} has no weights that are known: {', '.join(KNOWN_FILES)} or one .safetensors file"
        )
    return others


def check_parts(paths: list[Path]) -> None:
    """Raise if parts of a checkpoint are missing; their names tell how many there are."""
    count = int(paths[0].stem.rpartition("-")[2])
    if len(paths) != count:
        raise CheckpointError(f"{paths[0].parent} has {len(paths)} of {count} files; download the checkpoint again")


def warn_of_newer(used: list[Path], others: list[Path]) -> None:
    """Warn about weights that are not used, and were written after those that are."""
    newest = max(path.stat().st_mtime for path in used)
    for other in others:
        if other.stat().st_mtime > newest:
            logger.warning(
                "%s is newer than %s, which is used instead of it; remove the one that you do not want", other, used[0]
            )


def indexed_paths(index: Path) -> list[Path]:
    """The files that an index names; all must exist."""
    places = read_object(index, CheckpointError).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map")
    names = sorted({str(name) for name in places.values()})
    if outside := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{index} names files outside of its folder: {', '.join(outside[:5])}")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index} names {len(names)} files, of which {len(missing)} are missing: {', '.join(missing[:5])}; "
            "download the checkpoint again"
        )
    return [index.parent / name for name in names]


def unreadable(path: Path, error: Exception) -> LLMError:
    """The error for a file that cannot be opened: too little memory, or a broken file."""
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return NoRoom(
            f"{path} cannot be loaded: too little memory is free ({error}); end what else takes it, or get more"
        )
    return CheckpointError(f"{path} {file_problem(path, error)}")


def file_problem(path: Path, error: Exception) -> str:
    """Why a file cannot be read, and the remedy."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(40).startswith(b"version https://git-lfs")
    except OSError:
        return f"cannot be read: {error}"
    if is_pointer:
        return "is a pointer of Git LFS and not the file itself; run `git lfs pull` in its folder"
    return f"is cut off or damaged ({error}); download it again"
