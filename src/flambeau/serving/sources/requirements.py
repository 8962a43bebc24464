"""What a model's requirements come to: the key under which what they name is kept (pure, but for reading files)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

# A model's own copy of these would be gigabytes, and would not fit the drivers that the server was installed for.
SHARED = re.compile(r"torch|torchvision|torchaudio|triton|nvidia[-_.].*|flambeau", re.IGNORECASE)
NESTED = re.compile(r"\s*(?:-r|-c|--requirement|--constraint)[\s=]+(\S+)")
WORD = re.compile(r"[^\s=@;,]+")


def constraints(installed: Iterable[tuple[str, str]]) -> list[str]:
    """The versions that a model has to live with, because it shares them with the server."""
    return sorted(f"{name}=={version}" for name, version in installed if SHARED.fullmatch(name))


def key_of(requirements: Path | None, folder: Path, base: Iterable[str]) -> str:
    """Equal for models that need the same: the same lines, the same local files, on the same installation."""
    digest = hashlib.sha256()
    for word in base:
        digest.update(word.encode() + b"\0")
    for path in sorted(set(files_of(requirements, folder))) if requirements else ():
        digest.update(b"\0file\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def files_of(requirements: Path, folder: Path, *, depth: int = 5) -> Iterator[Path]:
    """A requirements file, and the files in the archive that it names: wheels, folders of wheels, further lists."""
    yield requirements
    for line in requirements.read_text(errors="replace").splitlines():
        nested = NESTED.match(line)
        for word in WORD.findall(line.partition(" #")[0]):
            path = (folder / word.removeprefix("file:").partition("#")[0]).resolve()
            if not path.is_relative_to(folder.resolve()):
                continue
            if nested and path.is_file() and path != requirements.resolve() and depth:
                yield from files_of(path, folder, depth=depth - 1)
            elif path.is_file():
                yield path
            elif path.is_dir() and path != folder.resolve():
                yield from (file for file in path.rglob("*") if file.is_file())
