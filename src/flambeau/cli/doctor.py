"""`flambeau doctor`: checks the machine for what a server needs."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import platform
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Literal

from flambeau import __version__
from flambeau.cli.output import print_json
from flambeau.serving.workers.host_resources import count_cores, count_gpus
from flambeau.wire.shared import SegmentPool, SegmentReader

OPTIONAL = {
    "torch": "models that use BaseHandler",
    "grpc": "gRPC (pip install 'flambeau[grpc]')",
    "torchvision": "the image handlers (pip install 'flambeau[vision]')",
    "onnxruntime": "ONNX models (pip install 'flambeau[onnx]')",
    "safetensors": "weights in safetensors files (pip install safetensors)",
    "tokenizers": "sentence_embedder (pip install 'flambeau[embed]'), language models (pip install 'flambeau[llm]')",
    "sentencepiece": "language models with a tokenizer.model (pip install 'flambeau[llm]')",
    "jinja2": "the chat templates of language models (pip install 'flambeau[llm]')",
    "captum": "explanations (pip install 'flambeau[explain]')",
}


# `--torchserve`: checks a configuration file and a model store.
EXAMINE_TORCHSERVE = "flambeau.torchserve.doctor.installation:examine_installation"

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    level: Level
    what: str
    text: str


def doctor(installation: tuple[Path, Path] | None, *, as_json: bool) -> None:
    """Print the findings; exit with status 1 if one of them is a problem."""
    findings = [*(pkgutil.resolve_name(EXAMINE_TORCHSERVE)(*installation) if installation else examine())]
    if as_json:
        print_json([{"level": f.level, "what": f.what, "text": f.text} for f in findings])
    else:
        marks = {"ok": "✓", "note": "·", "problem": "✗"}
        for finding in findings:
            print(f"{marks[finding.level]} {finding.what}: {finding.text}")
    if any(finding.level == "problem" for finding in findings):
        sys.exit(1)


def examine() -> Iterator[Finding]:
    """Check everything that a server needs."""
    yield Finding("ok", "flambeau", f"{__version__} on Python {platform.python_version()}, {platform.system()}")
    yield Finding("ok", "cores", str(count_cores()))
    yield Finding("ok", "GPUs", str(count_gpus()))
    yield from conflicting_packages()
    yield event_loop()
    yield shared_memory()
    yield temporary_folder()
    yield from (package(name, use) for name, use in OPTIONAL.items())
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


def package(name: str, use: str) -> Finding:
    """An optional package and its purpose; it is not imported."""
    if importlib.util.find_spec(name) is None:
        return Finding("note", name, f"not installed; needed for {use}")
    try:
        return Finding("ok", name, version_of({"grpc": "grpcio"}.get(name, name)))
    except PackageNotFoundError:
        return Finding("ok", name, "installed")


def port(number: int, api: str) -> Finding:
    """Whether a default port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            return Finding("note", f"port {number}", f"taken ({error.strerror}); choose another for the {api} API")
    return Finding("ok", f"port {number}", f"free, for the {api} API")
