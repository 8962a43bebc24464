"""Builds the CPU kernels once with the machine's C++ compiler and keeps the library in the user's cache."""

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

SOURCES = Path(__file__).parent / "csrc"
# No -ffast-math: linking with it would turn off denormal numbers for the whole process.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
BUILD_TIMEOUT_S = 600.0


def find_compiler() -> str:
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise FileNotFoundError("no C++ compiler was found; install g++, or name one in CXX")


def built_library(folder: Path, compiler: str = "", flags: Sequence[str] = FLAGS) -> Path:
    """The library for this machine; built if it is not in the folder."""
    compiler = compiler or find_compiler()
    library = folder / f"operators-{cache_key(compiler, flags)}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{library.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # if several workers start at once, one builds and the others wait
        if not library.exists():
            build(library, compiler, flags)
    return library


def build(library: Path, compiler: str, flags: Sequence[str]) -> None:
    """Compile the sources; the library appears complete or not at all."""
    log.info("building the CPU kernels with %s", compiler)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / "operators.so"
        command = [compiler, *flags, str(SOURCES / "operators.cpp"), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        built.replace(library)


def cache_key(compiler: str, flags: Sequence[str]) -> str:
    """A hash of the sources, the compiler, its flags and the processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\n".join([*flags, version, processor_features()]).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def processor_features() -> str:
    """The instruction sets of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def first_error_line(error: BaseException) -> str:
    """A failure in one line; for a compiler, the first error it reports."""
    text = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line for line in (text or str(error)).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else repr(error))
