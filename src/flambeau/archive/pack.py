"""Files → .mar, .tar.gz or folder."""

from __future__ import annotations

import glob
import io
import json
import logging
import os
import re
import secrets
import shutil
import tarfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from flambeau.archive.built_in import BUILT_IN, FOREIGN
from flambeau.archive.manifest import MANIFEST, RUNTIMES, Manifest
from flambeau.archive.unpack import safe_parts
from flambeau.errors import ArchiveError

logger = logging.getLogger(__name__)

Format = Literal["default", "zip-store", "tgz", "no-archive"]

SUFFIXES: Mapping[Format, str] = {"default": ".mar", "zip-store": ".mar", "tgz": ".tar.gz", "no-archive": ""}
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]*")
BUILT_IN_HANDLERS = frozenset(BUILT_IN) | frozenset(FOREIGN)
BUILT_IN_NATIVE_HANDLERS = frozenset({"BaseHandler", "TorchScriptHandler"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What goes into an archive; extra files may be files, folders (their contents go to the root) or patterns."""

    model_name: str
    handler: str
    version: str = "1.0"
    serialized_file: Path | None = None
    model_file: Path | None = None
    extra_files: Sequence[Path | str] = ()
    requirements_file: Path | None = None
    config_file: Path | None = None
    runtime: str = "python"


def pack(recipe: Recipe, export_path: Path, *, format: Format = "default", force: bool = False) -> Path:
    """Pack a model and return where it lies; a file appears whole or not at all, a folder is merged into."""
    _check(recipe, format)
    target = export_path / f"{recipe.model_name}{SUFFIXES[format]}"
    if os.path.lexists(target) and not force:
        raise ArchiveError(f"{target} already exists. Remove it, choose another export path, or use --force.")
    manifest = json.dumps(to_manifest(recipe).to_dict(), indent=2).encode()
    try:
        sources = gather(recipe, target)
        export_path.mkdir(parents=True, exist_ok=True)
        if format == "no-archive":
            _merge_into_folder(target, sources, manifest)
        else:
            with _appearing_whole(target) as file:
                if format == "tgz":
                    _write_tar(file, recipe.model_name, sources, manifest)
                else:
                    _write_zip(file, sources, manifest, is_deflated=format == "default")
    except OSError as error:
        raise ArchiveError(f"Cannot pack {target}: {error.filename or target}: {error.strerror}") from error
    return target


def to_manifest(recipe: Recipe) -> Manifest:
    """Describe a recipe the way its archive will: base names only, and `:function` kept on the handler."""
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


def gather(recipe: Recipe, target: Path) -> dict[str, Path]:
    """Map each name in the archive to its file, sorted by name; what lies at `target` is not packed into itself."""
    sources: dict[str, Path] = {}
    for name, source in _named_files(recipe, target.resolve()):
        # The manifest of an older archive, unpacked among the extra files; the new one takes its place.
        if name == MANIFEST:
            continue
        safe_parts(name)  # what is packed here must unpack anywhere
        other = sources.setdefault(name, source)
        if other.resolve() != source.resolve():
            raise ArchiveError(f"{other} and {source} would both be {name} in the archive; rename one of them.")
    for name in sources:
        for folder in Path(name).parents:
            if str(folder) in sources:
                raise ArchiveError(f"{sources[str(folder)]} takes the name of the folder that {sources[name]} needs.")
    return dict(sorted(sources.items()))


def find_handler(handler: str, runtime: str = "python") -> Path | None:
    """Find the file that a handler names, with or without suffix and function; None when it is built in."""
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
    raise ArchiveError(f"File does not exist: {candidates[0]}. A handler is a file or one of: {known}.")


def _base_name(file: Path | None) -> str | None:
    return None if file is None else file.name


def _check(recipe: Recipe, format: str) -> None:
    if not MODEL_NAME.fullmatch(recipe.model_name):
        raise ArchiveError(
            f"Model name {recipe.model_name!r} is not allowed; use letters, digits, '_', '-' and '.', "
            "and start with a letter or a digit."
        )
    if format not in SUFFIXES:
        raise ArchiveError(f"Unknown archive format {format!r}; use one of: {', '.join(SUFFIXES)}.")
    if recipe.runtime not in RUNTIMES:
        raise ArchiveError(f"Unknown runtime {recipe.runtime!r}; use one of: {', '.join(RUNTIMES)}.")


def _named_files(recipe: Recipe, target: Path) -> Iterator[tuple[str, Path]]:
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
                raise ArchiveError(f"File does not exist: {file}")
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
        raise ArchiveError(f"File does not exist: {extra}")
    matches = [Path(match) for match in sorted(glob.glob(extra, recursive=True))]
    if not matches:
        # A warning only, as it was in TorchServe: build scripts name patterns that may be empty.
        logger.warning("No file matches %s", extra)
    return [match for match in matches if not (match.is_dir() and _is_skipped(match.name))]


def _walk(folder: Path, target: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    real = folder.resolve()
    if real in above:
        raise ArchiveError(f"{folder} is a link to a folder that it lies in; remove it or name the files one by one.")
    for child in sorted(folder.iterdir()):
        if child.resolve() == target:
            continue
        if child.is_dir():
            if not _is_skipped(child.name):
                yield from _walk(child, target, (*above, real))
        elif child.is_file():
            yield child
        elif child.is_symlink():
            raise ArchiveError(f"File does not exist: {child} is a link that leads nowhere.")


def _is_skipped(folder: str) -> bool:
    return folder in ("__pycache__", "__MACOSX") or folder.startswith(".")


@contextmanager
def _appearing_whole(path: Path) -> Iterator[IO[bytes]]:
    """Open a hidden file beside `path` that takes its place when all went well."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            yield file
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _write_zip(file: IO[bytes], sources: Mapping[str, Path], manifest: bytes, *, is_deflated: bool) -> None:
    method = zipfile.ZIP_DEFLATED if is_deflated else zipfile.ZIP_STORED
    # Files older than 1980 do not fit a zip's clock; they get its first day.
    with zipfile.ZipFile(file, "w", method, strict_timestamps=False) as archive:
        archive.writestr(MANIFEST, manifest)
        for name, source in sources.items():
            archive.write(source, name)


def _write_tar(file: IO[bytes], top: str, sources: Mapping[str, Path], manifest: bytes) -> None:
    # Links are followed: what they point at stays behind.
    with tarfile.open(fileobj=file, mode="w:gz", dereference=True) as archive:
        header = tarfile.TarInfo(f"{top}/{MANIFEST}")
        header.size, header.mtime = len(manifest), int(time.time())
        archive.addfile(header, io.BytesIO(manifest))
        for name, source in sources.items():
            archive.add(source, f"{top}/{name}", recursive=False, filter=_anonymous)


def _anonymous(header: tarfile.TarInfo) -> tarfile.TarInfo:
    # Who packed it is nobody's business.
    return header.replace(uid=0, gid=0, uname="", gname="", mode=header.mode & 0o755, deep=False)


def _merge_into_folder(target: Path, sources: Mapping[str, Path], manifest: bytes) -> None:
    was_there = target.exists()
    try:
        for name, source in sources.items():
            path = target / name
            if path.resolve() != source.resolve():
                path.parent.mkdir(parents=True, exist_ok=True)
                with _appearing_whole(path) as copy, source.open("rb") as original:
                    shutil.copyfileobj(original, copy)
                path.chmod(source.stat().st_mode & 0o777)
        # The manifest comes last: a folder that has it is complete.
        (target / MANIFEST).parent.mkdir(parents=True, exist_ok=True)
        with _appearing_whole(target / MANIFEST) as copy:
            copy.write(manifest)
    except BaseException:
        if not was_there:
            shutil.rmtree(target, ignore_errors=True)
        raise
