"""A Python without some packages: a new environment with links to everything else that is installed here."""

from __future__ import annotations

import sys
import sysconfig
import venv
from collections.abc import Collection
from pathlib import Path


def python_without(folder: Path, hidden: Collection[str]) -> Path:
    """The interpreter of an environment in which the modules of these names cannot be imported."""
    venv.create(folder / "env", symlinks=True)
    links = folder / "env" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    for place in (Path(part) for part in sys.path if part and part not in standard):
        for path in place.iterdir() if place.is_dir() and "lib-dynload" not in place.name else ():
            name = path.name.partition(".")[0]
            if path.suffix != ".pth" and name not in hidden and not (links / path.name).exists():
                (links / path.name).symlink_to(path)
    return folder / "env" / "bin" / "python"
