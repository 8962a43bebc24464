"""The layers of the engine: core without torch, folders that import in one direction, backends with one protocol."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flambeau.llm
from flambeau.llm.backends.cpu.backend import CpuBackend
from flambeau.llm.backends.cuda.backend import CudaBackend
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.executor.backend import Backend
from flambeau.llm.executor.leader import LeaderBackend
from support.llm_steps import random_model, room

ROOT = Path(flambeau.llm.__file__).parent
ALLOWED = {  # which folders may import which; all may import config and errors
    "core": set(),
    "text": set(),
    "models": {"models/families"},
    "models/families": set(),
    "chat": set(),
    "grammar": {"chat", "core", "text"},
    "sampling": {"core"},
    "speculation": {"core", "sampling"},
    "quantize": {"models"},
    "checkpoints": {"models", "models/families", "quantize"},
    "adapters": {"checkpoints", "models", "quantize"},
    "executor": {"adapters", "core", "models", "models/families", "sampling", "speculation"},
    "kv_store": {"core", "executor"},
    "images": {"core", "models"},
    "sounds": {"core", "images", "models", "text"},
    "backends": {"adapters", "executor", "models", "sampling"},
    "backends/cpu": {"adapters", "backends", "executor", "models", "models/families", "quantize", "sampling"},
    "backends/hugging_face": {"backends", "executor", "models"},
    "backends/cuda": {
        *("adapters", "backends", "core", "executor", "models", "models/families", "quantize", "sampling")
    },
}


def folder_of(module: list[str]) -> str:
    path = ROOT.joinpath(*module)
    return "/".join(module if path.is_dir() else module[:-1])


def imported_folders(file: Path) -> set[str]:
    """The engine's folders that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flambeau.llm"):
            base = node.module.split(".")[2:]
            for alias in node.names:
                is_module = ROOT.joinpath(*base, alias.name).with_suffix(".py").exists()
                found.add(folder_of([*base, alias.name] if is_module else base))
    return found - {""}


@pytest.mark.parametrize("folder", ALLOWED)
def test_folders_import_in_one_direction(folder):
    files = (ROOT / folder).glob("*.py")
    assert set().union(*map(imported_folders, files)) - {folder} <= ALLOWED[folder]


def test_every_folder_is_listed():
    folders = {str(path.parent.relative_to(ROOT)) for path in ROOT.rglob("__init__.py")} - {"."}
    assert folders == set(ALLOWED)


def test_the_core_loads_neither_torch_nor_numpy():
    names = [f"flambeau.llm.core.{path.stem}" for path in (ROOT / "core").glob("*.py") if path.stem != "__init__"]
    program = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_backend_has_all_that_the_engine_asks_for():
    asked = {name for name in vars(Backend) if not name.startswith("_")}
    assert asked >= {"model", "device", "decode_path", "greedy", "async_decoder", "decode", "prefill", "close"}
    model = random_model()
    eager, cpu = EagerBackend(model, room(model, 1)), CpuBackend(model, room(model, 1))
    for backend in (eager, cpu, LeaderBackend(eager, ranks=None)):
        assert {name for name in asked if not hasattr(backend, name)} == set()
    assert asked - set(vars(CudaBackend)) <= {"model", "device", "decode_path"}  # set when it is made, on a GPU
    cpu.close()
