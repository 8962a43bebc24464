"""Where the library of CPU kernels comes from: prebuilt in the package, kept from an earlier build, or built now.

No torch here: `flambeau doctor` and the build of a wheel import this module too.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"  # in wheels only
SOURCES_HASH = "sources.sha256"  # in the folder of prebuilt libraries: the sources that they were compiled from
# No -ffast-math: linking with it would turn off denormal numbers for the whole process.
COMMON_FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
FLAGS = (*COMMON_FLAGS, "-march=native")
BUILD_TIMEOUT_S = 600.0
CHECK_TIMEOUT_S = 60.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Variant:
    """A prebuilt library: the compiler's flags, and what a processor must have, in the words of /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]


def variant(name: str, flags: str, features: str) -> Variant:
    return Variant(name, tuple(flags.split()), frozenset(features.split()))


AVX2 = "avx2 fma f16c bmi1 bmi2 movbe abm"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
BFLOAT16 = f"{AVX512} avx512_vnni avx512_bf16"
BFLOAT16_FLAGS = "-march=x86-64-v4 -mavx512vnni -mavx512bf16"
VARIANTS = {  # by machine, the fastest first
    "x86_64": (
        variant(
            "x86-64-v4-amx",
            f"{BFLOAT16_FLAGS} -mamx-tile -mamx-bf16 -mamx-int8",
            f"{BFLOAT16} amx_tile amx_bf16 amx_int8",
        ),
        variant("x86-64-v4-vnni-bf16", BFLOAT16_FLAGS, BFLOAT16),
        variant("x86-64-v4-vnni", "-march=x86-64-v4 -mavx512vnni", f"{AVX512} avx512_vnni"),
        variant("x86-64-v4", "-march=x86-64-v4", AVX512),
        variant("x86-64-v3", "-march=x86-64-v3", AVX2),
    ),
    "aarch64": (
        variant("armv8.2-a-dotprod", "-march=armv8.2-a+dotprod", "asimd asimddp atomics"),
        variant("armv8-a", "-march=armv8-a", "asimd"),
    ),
}

Origin = Literal["prebuilt", "kept", "compiler", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """Which library this machine uses, and why; with a compiler, where it will be."""

    origin: Origin
    reason: str
    path: Path | None = None


def find_kernels(folder: Path) -> KernelSource:
    """The library to use: prebuilt, else kept in the folder, else to be built there."""
    problem = ""
    for fitting in prebuilt_variants():
        path = PREBUILT / f"{fitting.name}.so"
        if not (problem := check(path, folder)):
            return KernelSource(origin="prebuilt", path=path, reason=f"prebuilt for {fitting.name}")
    kept = folder / f"operators-{cache_key(FLAGS)}.so"
    if kept.exists():
        return KernelSource(origin="kept", path=kept, reason="compiled for this processor")
    try:
        compiler = find_compiler()
    except FileNotFoundError as error:
        return KernelSource(origin="none", reason=f"{problem}; {error}" if problem else str(error))
    return KernelSource(origin="compiler", path=kept, reason=f"to be compiled with {compiler}")


def prebuilt_variants() -> Iterator[Variant]:
    """The prebuilt libraries that this processor executes, the fastest first."""
    written = PREBUILT / SOURCES_HASH
    if not written.is_file() or written.read_text() != sources_hash():
        return
    features = set(processor_features().split())
    for each in VARIANTS.get(platform.machine(), ()):
        if each.features <= features and (PREBUILT / f"{each.name}.so").is_file():
            yield each


def built_library(folder: Path, compiler: str = "", flags: Sequence[str] = FLAGS) -> Path:
    """The library for this machine; built if it is not in the folder."""
    library = folder / f"operators-{cache_key(flags)}.so"
    if library.exists():
        return library
    compiler = compiler or find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{library.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # if several workers start at once, one builds and the others wait
        if not library.exists():
            build(library, compiler, flags)
    return library


def build(library: Path, compiler: str, flags: Sequence[str], link_flags: Sequence[str] = ()) -> None:
    """Compile the sources; the library appears complete or not at all."""
    units, started = sorted(SOURCES.glob("*.cpp")), time.monotonic()
    log.info("building the CPU kernels with %s, once for this machine; plain PyTorch computes meanwhile", compiler)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / "operators.so"
        commands = [[compiler, *flags, "-c", str(unit), "-o", f"{scratch}/{unit.stem}.o"] for unit in units]
        for number, _ in enumerate(run_compilers(commands), start=1):
            log.info("CPU kernels: %d of %d files compiled", number, len(units))
        objects = [f"{scratch}/{unit.stem}.o" for unit in units]
        [_] = run_compilers([[compiler, *flags, "-shared", *objects, *link_flags, "-o", str(built)]])
        built.replace(library)
    log.info("the CPU kernels were built in %.0f s", time.monotonic() - started)


class Compiler:
    """A running compiler. It waits for everything else that wants the processor: a server answers meanwhile."""

    def __init__(self, command: Sequence[str]) -> None:
        nice = ["nice", "-n", "10"] if shutil.which("nice") else []
        self._command = [*nice, *command]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        self._started = time.monotonic()
        streams = {"stdin": subprocess.DEVNULL, "stdout": self._errors, "stderr": self._errors}
        # In a session of its own: a compiler starts others, which end with it.
        self._process = subprocess.Popen(self._command, start_new_session=True, **streams)  # type: ignore[call-overload]

    def has_ended(self) -> bool:
        """Raises if it failed, or takes too long."""
        if self._process.poll() is None:
            if time.monotonic() - self._started > BUILD_TIMEOUT_S:
                raise subprocess.TimeoutExpired(self._command, BUILD_TIMEOUT_S)
            return False
        if self._process.returncode:
            self._errors.seek(0)
            text = self._errors.read().decode(errors="replace")
            raise subprocess.CalledProcessError(self._process.returncode, self._command, stderr=text)
        return True

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._errors.close()


running: set[Compiler] = set()  # they end with the process, whose end nothing else delays


@atexit.register
def end_compilers() -> None:
    for compiler in [*running]:
        compiler.end()


def run_compilers(commands: Sequence[Sequence[str]]) -> Iterator[None]:
    """Run commands, as many at a time as there are processors; something is yielded whenever one has ended."""
    waiting, own = deque(commands), set[Compiler]()
    try:
        while waiting or own:
            while waiting and len(own) < (os.cpu_count() or 1):
                own.add(compiler := Compiler(waiting.popleft()))
                running.add(compiler)
            ended = [compiler for compiler in own if compiler.has_ended()]
            for compiler in ended:
                own.remove(compiler)
                running.discard(compiler)
                compiler.end()
                yield
            if not ended:
                time.sleep(POLL_S)
    finally:
        for compiler in own:
            running.discard(compiler)
            compiler.end()


def build_variants(folder: Path, machine: str, compiler: str = "") -> None:
    """All libraries that a wheel for these machines carries."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in VARIANTS[machine]:
        # The C++ library of the machine may be older than the compiler's.
        link_flags = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-s")
        flags = (*COMMON_FLAGS, *each.flags)
        build(folder / f"{each.name}.so", compiler or find_compiler(), flags, link_flags)
    (folder / SOURCES_HASH).write_text(sources_hash())


def find_compiler() -> str:
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise FileNotFoundError("no C++ compiler was found; install g++, or name one in CXX")


def cache_key(flags: Sequence[str]) -> str:
    """A hash of the sources, the compiler's flags and the processor."""
    text = "\n".join([sources_hash(), *flags, processor_features()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sources_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def processor_features() -> str:
    """The instruction sets of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


# ---- a library that was compiled elsewhere, or for instructions that a virtual machine only announces ----

CHECK = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).flambeau_self_test())"


def check(library: Path, folder: Path) -> str:
    """What is wrong with a library on this processor, or nothing. Another process tries it, once for a machine."""
    text = f"{library} {library.stat().st_mtime_ns} {processor_features()}"
    passed = folder / f"checked-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if passed.exists():
        return ""
    try:
        command = [sys.executable, "-I", "-S", "-c", CHECK, str(library)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{library.name} cannot be checked: {error}"
    if done.returncode:
        return f"{library.name} does not work on this processor ({failure(done)})"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        passed.touch()
    except OSError:
        pass  # checked again at the next start
    return ""


def failure(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    return lines[-1] if lines else f"test {done.returncode} failed"


def first_error_line(error: BaseException) -> str:
    """A failure in one line; for a compiler, the first error it reports."""
    text = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line for line in (text or str(error)).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else repr(error))
