"""`flambeau doctor`: what this machine has, and what is missing."""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path

from flambeau import __version__
from flambeau.cli.models import print_json
from flambeau.errors import ConfigError
from flambeau.serving.workers.devices import count_cores, count_gpus
from flambeau.torchserve.doctor.configuration import look_at_config
from flambeau.torchserve.doctor.finding import Finding, Level
from flambeau.torchserve.doctor.models import look_at
from flambeau.wire.shared_memory import SegmentPool, SegmentReader

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


def doctor(installation: tuple[Path, Path] | None, *, as_json: bool) -> None:
    """Print the findings; the exit status is 1 when one of them is a problem."""
    findings = [*(examine_installation(*installation) if installation else examine())]
    if as_json:
        print_json([{"level": f.level, "what": f.what, "text": f.text} for f in findings])
    else:
        marks = {"ok": "✓", "note": "·", "problem": "✗"}
        for finding in findings:
            print(f"{marks[finding.level]} {finding.what}: {finding.text}")
    if any(finding.level == "problem" for finding in findings):
        sys.exit(1)


def examine() -> Iterator[Finding]:
    """Look at everything a server needs."""
    yield Finding("ok", "flambeau", f"{__version__} on Python {platform.python_version()}, {platform.system()}")
    yield Finding("ok", "cores", str(count_cores()))
    yield Finding("ok", "GPUs", str(count_gpus()))
    yield from strangers()
    yield event_loop()
    yield shared_memory()
    yield temporary_folder()
    yield from (package(name, use) for name, use in OPTIONAL.items())
    yield from (port(number, api) for number, api in ((8080, "inference"), (8081, "management"), (8082, "metrics")))


def examine_installation(config: Path, store: Path) -> Iterator[Finding]:
    """Look at a TorchServe installation: its configuration, then every model and workflow in its store."""
    if not store.is_dir():
        raise ConfigError(f"{store} is not a folder; name the model store after the configuration file")
    findings, server = look_at_config(config, store)
    yield from findings
    paths = [path for path in sorted(store.iterdir()) if is_model(path)]
    if not paths:
        yield Finding("note", str(store), "there are no models in it")
    num_problems = 0
    for path in paths:
        for finding in look_at(path, installs=server.install_dependencies):
            num_problems += finding.level == "problem"
            yield finding
    text = f"{len(paths)} model{'s' * (len(paths) != 1)}, {num_problems} problem{'s' * (num_problems != 1)}"
    yield Finding("note" if num_problems else "ok", str(store), text)


def is_model(path: Path) -> bool:
    """Whether something in a store is a model, as far as its name tells."""
    if path.name.startswith("."):
        return False
    return path.is_dir() or path.name.endswith((".mar", ".model", ".tar.gz"))


def strangers() -> Iterator[Finding]:
    """TorchServe's own packages, which own the same files as ours."""
    for name in ("torchserve", "torch-model-archiver", "torch-workflow-archiver"):
        try:
            found = version_of(name)
        except PackageNotFoundError:
            continue
        remedy = f"pip uninstall {name}, then pip install --force-reinstall --no-deps flambeau"
        yield Finding("problem", name, f"{found} is installed too, and owns the same files: {remedy}")


def event_loop() -> Finding:
    """uvloop makes the server about twice as fast."""
    if importlib.util.find_spec("uvloop") is None:
        return Finding("note", "uvloop", "not installed: the server works, more slowly; pip install uvloop")
    return Finding("ok", "uvloop", version_of("uvloop"))


def shared_memory() -> Finding:
    """Large bodies travel through shared memory where they can."""
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
    """An optional package and what it is for; found without importing it."""
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
