"""The house stays as ARCHITECTURE.md draws it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from house import LAZY, LOAD, TYPE, House, knots  # noqa: E402

SERVER_SIDE = (
    "cli",
    "checking",
    "testing",
    "frontend",
    "serving",
    "wire",
    "archive",
    "config",
    "logs",
    "metrics",
    "errors",
    "file_import",
)
ALLOWED = {  # who may import whom, at load time
    "cli": {
        "checking",
        "frontend",
        "migrating",
        "serving",
        "worker",
        "archive",
        "config",
        "logs",
        "wire",
        "errors",
        "(root)",
    },
    "frontend": {"serving", "config", "logs", "metrics", "wire", "errors", "(root)"},
    "serving": {"archive", "config", "logs", "metrics", "wire", "errors", "(root)"},
    "worker": {"archive", "config", "metrics", "wire", "errors", "file_import", "(root)"},
    "checking": {"worker", "wire"},
    "testing": {"archive", "config", "worker", "wire", "(root)"},
    "handlers": {"llm", "wire", "errors", "file_import"},
    "llm": set(),
    "__main__": {"cli"},
    "examples": {"archive", "handlers", "errors"},
    "migrating": {"archive", "config", "errors"},
    "archive": {"config", "errors", "(root)"},
    "config": {"errors"},
    "logs": {"config", "errors"},
    "metrics": {"errors"},
    "wire": set(),
    "errors": set(),
    "file_import": set(),
    "(root)": set(),
}


@pytest.fixture(scope="module")
def house():
    return House(ROOT / "src" / "flambeau")


def test_no_import_cycle_between_rooms_or_modules(house):
    assert knots(house.room_graph(LOAD)) == []
    assert knots(house.room_graph(LOAD, LAZY, TYPE)) == []
    modules = {m.name: {t for t, kind in house.inner_imports(m) if kind == LOAD} for m in house.modules.values()}
    assert knots(modules) == []


def test_imports_point_one_way(house):
    graph = house.room_graph(LOAD)
    assert graph.keys() == ALLOWED.keys()
    assert {room: targets - ALLOWED[room] for room, targets in graph.items() if targets - ALLOWED[room]} == {}


AUTHORS_TOOLS = {  # they run a handler in their own process
    "flambeau.checking.calling",
    "flambeau.checking.checks",
    "flambeau.checking.leaks",
    "flambeau.cli.check",
    "flambeau.cli.run",
    "flambeau.cli.stage_table",
    "flambeau.testing.context",
}


def test_only_tools_for_authors_know_both_columns(house):
    doors = [
        m.name for m in house.modules.values() for t, _ in house.inner_imports(m) if t.startswith("flambeau.worker")
    ]
    outside = {name for name in doors if not name.startswith(("flambeau.worker", "flambeau.handlers"))}
    assert outside == AUTHORS_TOOLS


def test_server_side_never_loads_torch(house):
    assert not set(house.rooms_loading("torch")) & set(SERVER_SIDE)
    program = "import flambeau.cli.main, flambeau.cli.serve, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_worker_without_a_handler_loads_neither_torch_nor_the_server():
    program = (
        "import flambeau.worker.worker, sys; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'flambeau.serving', 'flambeau.frontend', 'typer', 'uvloop')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
