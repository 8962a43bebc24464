"""The header of a GGUF file: values by name, and where its tensors are.

The gguf package has a reader too, but that makes an object of every token: 15 s and 800 MB for a vocabulary of 150,000.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from flambeau.llm.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
ENDS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|im_end|>", "<|end|>", "<end_of_turn>"}
    | {"<|endoftext|>", "<|end_of_text|>"}
)
HARMONY = "<|return|>"  # ends a reply of gpt-oss, …
HARMONY_ENDS = frozenset({HARMONY, "<|call|>", "<|endoftext|>"})  # … whose messages, several a reply, end with <|end|>
ENCODER_NAME = "mmproj"
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF file; its shape has the rows first, as everywhere else."""

    name: str
    shape: tuple[int, ...]
    kind: int  # the number of its type
    offset: int  # in the file
    num_rows: int | None = None  # of a part of a tensor


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says before its weights."""

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a text or a turn: those that the file names, and control tokens known for it."""
        named = [self.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        tokens = self.values.get("tokenizer.ggml.tokens") or []
        types = self.values.get("tokenizer.ggml.token_type") or []
        control = [(i, text) for i, (text, kind) in enumerate(zip(tokens, types, strict=False)) if kind == 3]
        ends = HARMONY_ENDS if any(text == HARMONY for _, text in control) else ENDS
        known = [i for i, text in control if text in ends]
        return tuple(dict.fromkeys(i for i in (*named, *known) if isinstance(i, int)))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own, such as `context_length`."""
        return self.values.get(f"{self.architecture}.{key}", default)


@dataclass(frozen=True, slots=True)
class RecordedHeader(GgufHeader):
    """A header that records which values of its architecture were read."""

    read: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return GgufHeader.get(self, key, default)

    @property
    def unread(self) -> dict[str, Any]:
        """The values of the architecture that nothing has asked for, by their names without it."""
        start = f"{self.architecture}."
        own = {name.removeprefix(start): value for name, value in self.values.items() if name.startswith(start)}
        return {key: value for key, value in own.items() if key not in self.read}


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, or a folder that has GGUF files and no config.json."""
    return gguf_path(path) is not None


def gguf_path(path: Path) -> Path | None:
    """The GGUF file of a path, the first one of several parts; None if there is none."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(file for file in path.glob("*.gguf") if not is_encoder(file))
    first = [file for file in files if not (found := SPLIT.search(file.name)) or int(found[1]) == 1]
    if len(first) > 1:
        raise CheckpointError(f"{path} has several GGUF files: {', '.join(file.name for file in first)}; name one")
    return first[0] if first else None


def is_encoder(path: Path) -> bool:
    """Whether a file is called like those with the encoder of a model's images."""
    return ENCODER_NAME in path.name.lower()


def encoder_paths(path: Path) -> list[Path]:
    """The files with encoders beside a model's."""
    return sorted(file for file in path.parent.glob("*.gguf") if is_encoder(file) and file != path)


def gguf_parts(first: Path) -> list[Path]:
    """All files of a model that is split into several."""
    found = SPLIT.search(first.name)
    if found is None:
        return [first]
    start, count = first.name[: found.start()], int(found[2])
    paths = [first.with_name(f"{start}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise CheckpointError(f"{first} is one of {count} files, of which are missing: {', '.join(missing[:5])}")
    return paths


def read_model_header(path: Path) -> GgufHeader:
    """The header of a model, with the tensors of all its files."""
    first = read_header(path)
    others = [read_header(part).tensors for part in gguf_parts(path)[1:]]
    return replace(first, tensors={name: tensor for part in (*others, first.tensors) for name, tensor in part.items()})


def read_header(path: Path) -> GgufHeader:
    """The header of a file. The last few are kept: a model's tokenizer and weights both need it."""
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return _read(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4)
def _read(path: Path, changed_ns: int, size: int) -> GgufHeader:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(path, content).header()
    except (struct.error, IndexError, UnicodeDecodeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is cut off or damaged ({error}); download it again") from error


class _Reader:
    """Reads a header from front to back."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path, self._content, self._at = path, content, 0

    def header(self) -> GgufHeader:
        if self._content[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        (version,) = self._numbers("I", 1)
        if version not in VERSIONS:
            raise CheckpointError(f"{self._path} has version {version} of GGUF; supported are 2 and 3, little-endian")
        num_tensors, num_values = self._numbers("Q", 2)
        values = {}
        for _ in range(num_values):
            key = self._string()
            values[key] = self._value(*self._numbers("I", 1))
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"alignment {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = {name: GgufTensor(name, shape, kind, start + offset) for name, shape, kind, offset in described}
        return GgufHeader(self._path, values, tensors)

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        size = count * struct.calcsize(f"<{code}")
        if size > len(self._content) - self._at:
            raise ValueError("it ends in its header")
        self._at += size
        return struct.unpack_from(f"<{count}{code}", self._content, self._at - size)

    def _string(self) -> str:
        (length,) = self._numbers("Q", 1)
        if length > len(self._content) - self._at:
            raise ValueError("it ends in its header")
        self._at += length
        return self._content[self._at - length : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._numbers(self._code(kind), 1)[0]
        (inner,), (count,) = self._numbers("I", 1), self._numbers("Q", 1)
        if inner == STRING:
            if count > len(self._content):
                raise ValueError("it ends in its header")
            return [self._string() for _ in range(count)]
        return list(self._numbers(self._code(inner), count))

    def _code(self, kind: int) -> str:
        if kind not in NUMBERS:
            raise ValueError(f"type {kind} of a value")
        return NUMBERS[kind]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dimensions,) = self._numbers("I", 1)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"{num_dimensions} dimensions of {name}")
        shape = tuple(reversed(self._numbers("Q", num_dimensions)))
        (kind,), (offset,) = self._numbers("I", 1), self._numbers("Q", 1)
        if prod(shape) > len(self._content) * 32:  # even types of 1 bit need more bytes
            raise ValueError(f"the shape of {name}")
        return name, shape, kind, offset
