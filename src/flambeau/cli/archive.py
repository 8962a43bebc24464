"""`flambeau archive …`: packs, inspects and unpacks archives."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from flambeau.archive.pack import ArchiveFormat, Recipe, check_syntax, find_handler
from flambeau.archive.pack import pack as pack_archive
from flambeau.archive.unpack import list_entries, read_manifest_of
from flambeau.archive.unpack import unpack as unpack_archive
from flambeau.cli.output import print_json, print_table
from flambeau.errors import ArchiveError


def pack(recipe: Recipe, export_path: Path, format_name: str, *, force: bool, as_json: bool) -> None:
    """Pack an archive and print its path."""
    known = {name: name for name in get_args(ArchiveFormat)}
    if format_name not in known:
        raise ArchiveError(f"there is no format {format_name!r}; it may be {', '.join(known)}")
    if recipe.runtime != "LSP" and (handler := find_handler(recipe.handler)) is not None:
        check_syntax(handler)
    path = pack_archive(recipe, export_path, format=known[format_name], force=force)
    print_json({"path": str(path)}) if as_json else print(path)


def inspect(path: Path, *, as_json: bool) -> None:
    """Print an archive's manifest and files."""
    manifest, entries = read_manifest_of(path), list_entries(path)
    if as_json:
        files = [{"name": e.name, "bytes": e.size_bytes, "packedBytes": e.packed_bytes} for e in entries]
        print_json({"manifest": dict(manifest.raw) if manifest else None, "files": files})
        return
    if manifest is None:
        print("no manifest: the register request must give a name and a handler")
    else:
        fields = ("model_name", "version", "handler", "serialized_file", "model_file", "config_file", "runtime")
        rows = [[field, str(value)] for field in fields if (value := getattr(manifest, field))]
        print_table(["MANIFEST", ""], rows)
    print()
    print_table(["FILE", "BYTES", "PACKED"], [[e.name, str(e.size_bytes), str(e.packed_bytes)] for e in entries])


def unpack(path: Path, into: Path) -> None:
    """Unpack an archive into a new or empty folder."""
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise ArchiveError(f"{into} is not an empty folder; give a new one with --into")
    into.mkdir(parents=True, exist_ok=True)
    unpack_archive(path, into)
    print(into)
