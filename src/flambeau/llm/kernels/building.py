"""Builds the CPU kernels with the machine's own C++ compiler, once, and keeps them in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
# No -ffast-math: linking with it would turn off tiny numbers for the whole process.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
BUILD_LIMIT_S = 600.0


def cache_folder() -> Path:
    """Where what was compiled is kept: FLAMBEAU_CACHE, or the user's cache folder."""
    named = os.environ.get("FLAMBEAU_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flambeau"


def find_compiler() -> str:
    """The C++ compiler of this machine."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise FileNotFoundError("no C++ compiler was found; install g++, or name one in CXX")


def built_library(folder: Path, compiler: str = "", flags: Sequence[str] = FLAGS) -> Path:
    """The library of these kernels for this machine, built unless someone has done so before."""
    compiler = compiler or find_compiler()
    library = folder / f"operators-{key_of(compiler, flags)}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{library.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers may start at once: one builds, the others wait
        if not library.exists():
            build(library, compiler, flags)
    return library


def build(library: Path, compiler: str, flags: Sequence[str]) -> None:
    """Compile the sources; the library appears whole or not at all."""
    log.info("building the CPU kernels with %s", compiler)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / "operators.so"
        command = [compiler, *flags, str(SOURCES / "operators.cpp"), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_LIMIT_S)
        made.replace(library)


def key_of(compiler: str, flags: Sequence[str]) -> str:
    """Changes with the sources, the compiler and the processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\n".join([*flags, version, processor()]).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def processor() -> str:
    """What instructions this machine's processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def reason(error: BaseException) -> str:
    """A failure in one line; of a compiler, the first error it names."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line for line in (said or str(error)).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else repr(error))
