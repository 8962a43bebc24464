"""`flambeau doctor`: checks the machine for what a server needs."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Literal

from flambeau import __version__
from flambeau.archive.packages import CPU_INDEX, TORCH_BUILDS, index_for, install_line
from flambeau.cli.output import print_json, print_wrapped
from flambeau.serving.workers.host_resources import count_cores, count_gpus, gpu_properties
from flambeau.wire.shared_memory import SegmentPool, SegmentReader

OPTIONAL = {  # module → what it is for, and the extra that has it
    "torch": ("models that use BaseHandler", "torch"),
    "grpc": ("gRPC", "grpc"),
    "torchvision": ("the image handlers", "vision"),
    "onnxruntime": ("ONNX models", "onnx"),
    "safetensors": ("weights in safetensors files", "llm"),
    "tokenizers": ("sentence_embedder and language models", "embed"),
    "sentencepiece": ("language models with a tokenizer.model", "llm"),
    "jinja2": ("the chat templates of language models", "llm"),
    "captum": ("explanations", "explain"),
    "transformers": ("models of its tasks, and for sounds and most images in chats", "transformers"),
    "PIL": ("images", "vision"),
    "soundfile": ("sounds that are not WAV files", "audio"),
    "av": ("videos in chats", "video"),
}
DISTRIBUTIONS = {"grpc": "grpcio", "PIL": "pillow"}
IMPORT_S = 300.0


# `--torchserve`: checks a configuration file and a model store.
EXAMINE_TORCHSERVE = "flambeau.torchserve.doctor.installation:examine_installation"

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    level: Level
    what: str
    text: str
    fix: str = ""  # a command, or a line for a file, that mends it


def doctor(installation: tuple[Path, Path] | None, *, as_json: bool) -> None:
    """Check this machine, or an installation of TorchServe."""
    report(pkgutil.resolve_name(EXAMINE_TORCHSERVE)(*installation) if installation else examine(), as_json=as_json)


def report(found: Iterable[Finding], *, as_json: bool) -> None:
    """Print the findings; exit with status 1 if one of them is a problem."""
    findings = [*found]
    if as_json:
        print_json([{name: value for name, value in asdict(finding).items() if value} for finding in findings])
    else:
        marks = {"ok": "✓", "note": "·", "problem": "✗"}
        for finding in findings:
            print_wrapped(f"{marks[finding.level]} {finding.what}: {finding.text}", "  ")
            if finding.fix:
                print(f"    → {finding.fix}")
    if any(finding.level == "problem" for finding in findings):
        sys.exit(1)


def examine() -> Iterator[Finding]:
    """Check everything that a server needs."""
    yield Finding("ok", "flambeau", f"{__version__} on Python {platform.python_version()}, {platform.system()}")
    yield Finding("ok", "cores", str(count_cores()))
    yield from gpus()
    yield compiler()
    yield cpu_kernels()
    yield from conflicting_packages()
    yield event_loop()
    yield shared_memory()
    yield temporary_folder()
    yield from packages()
    yield from (port(number, api) for number, api in ((8080, "inference"), (8081, "management"), (8082, "metrics")))


def conflicting_packages() -> Iterator[Finding]:
    """TorchServe's own packages, which install the same files."""
    for name in ("torchserve", "torch-model-archiver", "torch-workflow-archiver"):
        try:
            found = version_of(name)
        except PackageNotFoundError:
            continue
        remedy = f"pip uninstall {name}, then pip install --force-reinstall --no-deps flambeau"
        yield Finding("problem", name, f"{found} is installed too, and overwrites the same files: {remedy}")


def event_loop() -> Finding:
    """With uvloop the server is about twice as fast."""
    if importlib.util.find_spec("uvloop") is None:
        return Finding("note", "uvloop", "not installed: the server works, more slowly; pip install uvloop")
    return Finding("ok", "uvloop", version_of("uvloop"))


def shared_memory() -> Finding:
    """Large bodies are passed through shared memory if possible."""
    if not SegmentPool.is_supported():
        return Finding("note", "shared memory", "not on this system; large bodies are copied through sockets")
    pool = SegmentPool()
    segment = pool.take(1)
    works = SegmentReader().can_read(segment.describe(1))
    segment.close()
    if not works:
        return Finding("note", "shared memory", "/proc cannot be read; large bodies are copied through sockets")
    return Finding("ok", "shared memory", "works")


def temporary_folder() -> Finding:
    """Archives are unpacked there."""
    folder = Path(tempfile.gettempdir())
    if not os.access(folder, os.W_OK):
        return Finding("problem", "temporary folder", f"{folder} is not writable; set TMPDIR to one that is")
    status = os.statvfs(folder)
    free_gb = status.f_bavail * status.f_frsize / 1e9
    level: Level = "ok" if free_gb > 1 else "note"
    return Finding(level, "temporary folder", f"{folder}, {free_gb:.1f} GB free")


def gpus() -> Iterator[Finding]:
    """Each NVIDIA GPU with its memory and driver; of others, the number."""
    rows = gpu_properties()
    for number, name, memory_mib, driver in rows:
        yield Finding("ok", f"GPU {number}", f"{name}, {int(memory_mib) / 1024:.0f} GiB, driver {driver}")
    if not rows:
        others = count_gpus()
        yield Finding("ok", "GPUs", str(others) if others else "none: models run on the CPU")


def compiler() -> Finding:
    """torch.compile needs one, and the engine's CPU kernels where the wheel has none for this processor."""
    from flambeau.llm.backends.cpu.kernel_builds import find_compiler

    try:
        return Finding("ok", "C++ compiler", find_compiler())
    except FileNotFoundError:
        text = "none found: torch.compile does not work"
        return Finding("note", "C++ compiler", text, "apt-get install g++  # or set CXX")


def cpu_kernels() -> Finding:
    """Which of the engine's kernels this processor uses, and why."""
    from flambeau.llm.backends.cpu.kernel_builds import find_kernels
    from flambeau.llm.cache_folder import cache_folder

    found = find_kernels(cache_folder() / "kernels")
    if found.origin == "none":
        text = f"none, so that language models are slower: {found.reason}"
        return Finding("note", "CPU kernels", text, "apt-get install g++  # or a wheel with kernels for this processor")
    if found.origin == "compiler":
        text = f"{found.reason} by the first model, in about half a minute; plain PyTorch computes meanwhile"
        return Finding("ok", "CPU kernels", text)
    return Finding("ok", "CPU kernels", f"{found.reason} ({found.path})")


def packages() -> Iterator[Finding]:
    """Each optional package: its version if it can be imported, else how to install it."""
    found = [name for name in OPTIONAL if importlib.util.find_spec(name) is not None]
    problems = import_problems(found)
    for name, (use, extra) in OPTIONAL.items():
        if name not in found:
            fix = install_line([name], extra)
            if name in TORCH_BUILDS and CPU_INDEX not in fix and "torch" not in found and not count_gpus():
                fix += CPU_INDEX  # 0.2 GB, not 3
            yield Finding("note", name, f"not installed; needed for {use}", fix)
        elif problem := problems.get(name):
            text = f"installed, but it cannot be imported: {problem}"
            yield Finding("problem", name, text, reinstall_line(DISTRIBUTIONS.get(name, name)))
        else:
            yield Finding("ok", name, installed_version(name))


def reinstall_line(package: str) -> str:
    """The command that mends a package; torchvision and torchaudio must match torch."""
    companion = "torch " if package in ("torchvision", "torchaudio") else ""
    return f"pip install --force-reinstall {companion}{package}{index_for([package])}"


def installed_version(module: str) -> str:
    try:
        return version_of(DISTRIBUTIONS.get(module, module))
    except PackageNotFoundError:
        return "installed"


IMPORT_ALL = """
import importlib, json, os, sys
out = os.dup(1)
os.dup2(2, 1)
for name in sys.argv[1:]:
    os.write(out, (json.dumps([name, "it ends the process"]) + "\\n").encode())
    try:
        importlib.import_module(name)
        problem = ""
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}".partition("\\n")[0]
    os.write(out, (json.dumps([name, problem]) + "\\n").encode())
os._exit(0)
"""


def import_problems(modules: Sequence[str]) -> dict[str, str]:
    """Why modules cannot be imported. Another process imports them, since a broken one may end it."""
    left, problems = [*modules], dict[str, str]()
    while left:
        try:
            done = subprocess.run(
                [sys.executable, "-c", IMPORT_ALL, *left], capture_output=True, text=True, timeout=IMPORT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return {**problems, **dict.fromkeys(left, str(error)[:200])}
        told = dict[str, str](json.loads(line) for line in done.stdout.splitlines())
        problems |= {name: problem for name, problem in told.items() if problem}
        if not told:
            return {**problems, **dict.fromkeys(left, f"python ended with status {done.returncode}")}
        left = left[len(told) :]  # those behind one that ended the process
    return problems


def port(number: int, api: str) -> Finding:
    """Whether a default port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            return Finding("note", f"port {number}", f"taken ({error.strerror}); choose another for the {api} API")
    return Finding("ok", f"port {number}", f"free, for the {api} API")
