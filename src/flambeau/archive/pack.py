"""Packs files into a .mar, a .tar.gz or a model folder."""

from __future__ import annotations

import ast
import glob
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flambeau.archive.manifest import BUILT_IN, MANIFEST, RUNTIMES, UNSUPPORTED, Manifest
from flambeau.archive.unpack import safe_parts
from flambeau.archive.writer import atomic_write, merge_into_folder, write_tar, write_zip
from flambeau.errors import ArchiveError, MissingFile

logger = logging.getLogger(__name__)

ArchiveFormat = Literal["default", "zip-store", "tgz", "no-archive"]

SUFFIXES: Mapping[ArchiveFormat, str] = {"default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz", "no-archive": ""}
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")
BUILT_IN_HANDLERS = frozenset(BUILT_IN) | frozenset(UNSUPPORTED)
BUILT_IN_NATIVE_HANDLERS = frozenset({"BaseHandler", "TorchScriptHandler"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The content of an archive; extra files may be files, folders (their contents go to the root) or patterns."""

    model_name: str
    handler: str
    version: str = "1.0"
    serialized_file: Path | None = None
    model_file: Path | None = None
    extra_files: Sequence[Path | str] = ()
    requirements_file: Path | None = None
    config_file: Path | None = None
    runtime: str = "python"


def pack(recipe: Recipe, export_path: Path, *, format: ArchiveFormat = "default", force: bool = False) -> Path:
    """Pack a model and return the path. A file is written atomically; a folder is merged into."""
    _check(recipe, format)
    target = path_of(recipe.model_name, export_path, format)
    if os.path.lexists(target) and not force:
        raise ArchiveError(f"{target} already exists. Remove it, choose another export path, or use --force.")
    manifest = json.dumps(to_manifest(recipe).to_dict(), indent=2).encode()
    return write(target, recipe.model_name, files_of(recipe, target), manifest, format)


def write(target: Path, model_name: str, sources: Mapping[str, Path], manifest: bytes, format: ArchiveFormat) -> Path:
    """Write files and their manifest to `target`."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if format == "no-archive":
            merge_into_folder(target, sources, manifest)
        else:
            with atomic_write(target) as file:
                if format == "tgz":
                    write_tar(file, model_name, sources, manifest)
                else:
                    write_zip(file, sources, manifest, is_deflated=format == "default")
    except OSError as error:
        raise ArchiveError(f"Cannot pack {target}: {error.filename or target}: {error.strerror}") from error
    return target


def path_of(model_name: str, export_path: Path, format: ArchiveFormat = "default") -> Path:
    return export_path / f"{model_name}{SUFFIXES[format]}"


def files_of(recipe: Recipe, target: Path | None = None, *, last_wins: bool = False) -> dict[str, Path]:
    """The files of a recipe by their names in the archive. A file at `target` is left out.

    Two files with one name are an error; with `last_wins` the later one is packed, with a warning.
    """
    try:
        return gather(_named_files(recipe, target.resolve() if target else None), last_wins=last_wins)
    except ArchiveError:
        raise
    except OSError as error:
        raise ArchiveError(f"Cannot pack {error.filename}: {error.strerror}") from error


def files_below(folder: Path, target: Path) -> dict[str, Path]:
    """The files of a folder by their names in the archive. Files at or below `target` are left out."""
    place = target.resolve()
    files = ((file.relative_to(folder).as_posix(), file) for file in _walk(folder, place, ()))
    return gather((name, file) for name, file in files if place not in (real := file.resolve(), *real.parents))


def check_syntax(file: Path) -> None:
    """Reject a Python file with a syntax error, with its line."""
    try:
        ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        where = f"{file}:{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else str(file)
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ArchiveError(f"{where}: the handler has a syntax error: {text}") from None


def to_manifest(recipe: Recipe) -> Manifest:
    """The manifest of a recipe: base names only; the handler keeps its `:function`."""
    handler, colon, function = recipe.handler.partition(":")
    return Manifest(
        model_name=recipe.model_name,
        version=recipe.version,
        handler=Path(handler).name + colon + function,
        serialized_file=_base_name(recipe.serialized_file),
        model_file=_base_name(recipe.model_file),
        requirements_file=_base_name(recipe.requirements_file),
        config_file=_base_name(recipe.config_file),
        runtime=recipe.runtime,
    )


def gather(named: Iterable[tuple[str, Path]], *, last_wins: bool = False) -> dict[str, Path]:
    """Check names and return name in the archive → file, sorted by name."""
    sources: dict[str, Path] = {}
    for name, source in named:
        # Extra files may hold the manifest of an older archive; the new one replaces it.
        if name == MANIFEST:
            continue
        safe_parts(name)  # raises for names that cannot be unpacked
        other = sources.get(name, source)
        if other.resolve() != source.resolve():
            if not last_wins:
                raise ArchiveError(f"{other} and {source} would both be {name} in the archive; rename one of them.")
            logger.warning("%s replaces %s in the archive: both are named %s", source, other, name)
        sources[name] = source
    for name in sources:
        for folder in Path(name).parents:
            if str(folder) in sources:
                raise ArchiveError(f"{sources[str(folder)]} has the name of the folder of {sources[name]}; rename it.")
    return dict(sorted(sources.items()))


def find_handler(handler: str, runtime: str = "python") -> Path | None:
    """The file of a handler value, with or without suffix and `:function`; None for a built-in handler."""
    stem, _, _ = handler.partition(":")
    suffixes = (".so", ".dylib") if runtime == "LSP" else (".py",)
    built_in = BUILT_IN_NATIVE_HANDLERS if runtime == "LSP" else BUILT_IN_HANDLERS
    candidates = [Path(stem)] if stem.endswith(suffixes) else [Path(stem + suffix) for suffix in suffixes]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if stem in built_in:
        return None
    known = ", ".join(sorted(built_in))
    raise MissingFile(f"File does not exist: {candidates[0]}. A handler is a file or one of: {known}.")


def _base_name(file: Path | None) -> str | None:
    return None if file is None else file.name


def check_name(name: str, kind: str = "Model") -> None:
    """Reject a name that is not valid in both a file name and a URL."""
    if not MODEL_NAME.fullmatch(name):
        raise ArchiveError(
            f"{kind} name {name!r} is not allowed; use letters, digits, '_', '-' and '.', "
            "and start with a letter or a digit."
        )


def _check(recipe: Recipe, format: str) -> None:
    check_name(recipe.model_name)
    if format not in SUFFIXES:
        raise ArchiveError(f"Unknown archive format {format!r}; use one of: {', '.join(SUFFIXES)}.")
    if recipe.runtime not in RUNTIMES:
        raise ArchiveError(f"Unknown runtime {recipe.runtime!r}; use one of: {', '.join(RUNTIMES)}.")


def _named_files(recipe: Recipe, target: Path | None) -> Iterator[tuple[str, Path]]:
    single = (
        find_handler(recipe.handler, recipe.runtime),
        recipe.model_file,
        recipe.serialized_file,
        recipe.requirements_file,
        recipe.config_file,
    )
    for file in single:
        if file is not None:
            if not file.is_file():
                raise MissingFile(f"File does not exist: {file}")
            yield file.name, file
    for extra in recipe.extra_files:
        for path in _expand(str(extra).strip()):
            if path.is_dir():
                yield from ((file.relative_to(path).as_posix(), file) for file in _walk(path, target, ()))
            else:
                yield path.name, path


def _expand(extra: str) -> list[Path]:
    path = Path(extra)
    if path.exists():
        return [path]
    if not glob.has_magic(extra):
        raise MissingFile(f"File does not exist: {extra}")
    matches = [Path(match) for match in sorted(glob.glob(extra))]
    if not matches:
        # Only a warning: build scripts pass patterns that may match nothing.
        logger.warning("No file matches %s", extra)
    return [match for match in matches if not (match.is_dir() and is_skipped(match.name))]


def _walk(folder: Path, target: Path | None, above: tuple[Path, ...]) -> Iterator[Path]:
    real = folder.resolve()
    if real in above:
        raise ArchiveError(f"{folder} is a link to one of its parent folders; remove it or name the files one by one.")
    for child in sorted(folder.iterdir()):
        if child.resolve() == target:
            continue
        if child.is_dir():
            if not is_skipped(child.name):
                yield from _walk(child, target, (*above, real))
        elif child.is_file():
            yield child
        elif child.is_symlink():
            raise MissingFile(f"File does not exist: {child} is a broken link.")


def is_skipped(folder: str) -> bool:
    """Whether a folder of that name is not packed."""
    return folder in ("__pycache__", "__MACOSX") or folder.startswith(".")
