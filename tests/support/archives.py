"""Archives of the handlers in this folder."""

from __future__ import annotations

from pathlib import Path

from flambeau.archive.pack import ArchiveFormat, Recipe, pack
from support.running import HANDLERS


def pack_handler(
    folder: Path,
    handler: str,
    *,
    name: str | None = None,
    version: str = "1.0",
    config: str | None = None,
    format: ArchiveFormat = "default",
    file: str | None = None,
) -> Path:
    """Pack a handler; `file` renames the archive."""
    settings = None
    if config is not None:
        settings = folder / "model-config.yaml"
        settings.write_text(config)
    recipe = Recipe(
        model_name=name or handler, version=version, handler=str(HANDLERS / f"{handler}.py"), config_file=settings
    )
    path = pack(recipe, folder, format=format, force=True)
    return path.rename(folder / file) if file else path
