"""Puts compiled CPU kernels into a wheel if FLAMBEAU_PREBUILD is 1; without it, wheels hold no compiled code.

The wheel's name then says for which processors and from which C library on it is.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "src/flambeau/llm/backends/cpu"


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles all variants for this machine's architecture."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("FLAMBEAU_PREBUILD") != "1" or version == "editable":
            return
        folder = Path(self.root) / "build" / "kernels"
        machine = platform.machine()
        kernel_builds(Path(self.root)).build_variants(folder, machine)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{glibc_version(folder)}_{machine}"
        build_data["force_include"][str(folder)] = f"{KERNELS.removeprefix('src/')}/prebuilt"


def kernel_builds(root: Path) -> ModuleType:
    """The module that compiles them; the package itself is not installed here."""
    spec = importlib.util.spec_from_file_location("kernel_builds", root / KERNELS / "kernel_builds.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def glibc_version(folder: Path) -> str:
    """The newest version of the C library that the libraries need, as in `2_17`."""
    found = [
        tuple(map(int, match.split(b".")))
        for library in folder.glob("*.so")
        for match in re.findall(rb"GLIBC_(\d+\.\d+)", library.read_bytes())
    ]
    return "_".join(map(str, max([*found, (2, 17)])[:2]))
