"""The house stays as ARCHITECTURE.md draws it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from support.package_imports import ROOT, read_house  # first: it finds the script

from house import LAZY, LOAD, RULES, TYPE, knots, walk  # isort: skip

SERVER_SIDE = (
    "cli",
    "client",
    "cluster",
    "certificates",
    "handler_checks",
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
    "small_files",
    "span_export",
    "websocket_frames",
)
ALLOWED = {  # who may import whom, at load time
    "cli": {
        "handler_checks",
        "frontend",
        "serving",
        "worker",
        "archive",
        "config",
        "http_client",
        "logs",
        "wire",
        "errors",
        "(root)",
    },
    "cluster": {"archive", "config", "errors", "serving", "wire", "(root)"},
    "certificates": set(),
    "frontend": {
        "certificates",
        "serving",
        "config",
        "logs",
        "metrics",
        "small_files",
        "wire",
        "websocket_frames",
        "errors",
        "llm",
        "(root)",
    },
    "serving": {
        "archive",
        "certificates",
        "config",
        "logs",
        "metrics",
        "small_files",
        "span_export",
        "wire",
        "errors",
        "(root)",
    },
    "worker": {"archive", "config", "metrics", "span_export", "wire", "errors", "file_import", "(root)"},
    "handler_checks": {"worker", "wire", "errors"},
    "client": {"http_client", "websocket_frames", "errors", "small_files"},
    "testing": {"archive", "client", "config", "http_client", "worker", "wire", "(root)"},
    "handlers": {"archive", "llm", "metrics", "wire", "errors", "file_import"},
    "llm": set(),
    "__main__": {"cli"},
    "examples": {"archive", "handlers", "errors"},
    "archive": {"config", "errors", "small_files", "(root)"},
    "config": {"errors", "small_files"},
    "logs": {"config", "wire", "errors"},
    "metrics": {"wire", "errors", "small_files"},
    "wire": {"llm"},
    "http_client": {"errors"},
    "websocket_frames": set(),
    "span_export": {"errors"},
    "errors": set(),
    "file_import": set(),
    "small_files": set(),
    "(root)": set(),
}
ALLOWED["torchserve"] = {*ALLOWED} - {"examples", "testing"}  # the top floor

SHIMS = ("ts", "model_archiver", "workflow_archiver")  # import names of TorchServe


@pytest.fixture(scope="module")
def house():
    return read_house()


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
    "flambeau.handler_checks.guarded_call",
    "flambeau.handler_checks.suite",
    "flambeau.cli.check",
    "flambeau.cli.run",
    "flambeau.cli.output",
    "flambeau.testing.context",
}


def test_only_tools_for_authors_know_both_columns(house):
    doors = [
        m.name for m in house.modules.values() for t, _ in house.inner_imports(m) if t.startswith("flambeau.worker")
    ]
    both = ("flambeau.worker", "flambeau.handlers", "flambeau.torchserve")
    outside = {name for name in doors if not name.startswith(both)}
    assert outside == AUTHORS_TOOLS


def loaded_by(modules: str) -> set[str]:
    program = f"import {modules}, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    return {*found.split()}


def test_server_side_never_loads_torch_nor_at_once_what_few_servers_need(house):
    assert not set(house.rooms_loading("torch")) & set(SERVER_SIDE)
    loaded = loaded_by("flambeau.cli.main, flambeau.cli.serve")
    assert "flambeau.serving.server" in loaded
    few_need = {"importlib.metadata", "flambeau.serving.cluster.cluster", "grpc", "python_multipart", "yaml"}
    assert not loaded & {"torch", *few_need}


def test_worker_without_a_handler_loads_neither_torch_nor_the_server():
    loaded = loaded_by("flambeau.worker.worker")
    others = {"torch", "flambeau.serving", "flambeau.frontend", "typer", "uvloop", "importlib.metadata", "yaml"}
    assert not loaded & others


def test_nothing_imports_the_room_for_torchserve(house):
    importers = {room for room, targets in house.room_graph(LOAD, LAZY, TYPE).items() if "torchserve" in targets}
    assert importers == set()


@pytest.mark.parametrize("title", RULES)
def test_rules_of_the_layout_are_kept(house, title):
    assert RULES[title](house) == []


@pytest.mark.parametrize("package", SHIMS)
def test_import_names_of_torchserve_have_no_behavior(package):
    for file in (ROOT / "src" / package).rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            assert is_re_export(node), f"{file}, line {node.lineno}"


def is_re_export(node):
    """A docstring, an import, `__all__`, an alias, the forwarding of patched names, or the call of a script."""
    if isinstance(node, ast.Expr) and ast.unparse(node).startswith("import_names.forward(__name__, "):
        return True
    if isinstance(node, ast.Assign):
        is_list = [target.id for target in node.targets if isinstance(target, ast.Name)] == ["__all__"]
        return is_list or isinstance(node.value, ast.Name | ast.Attribute)
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "__name__ == '__main__'" and len(node.body) == 1 and not node.orelse
    return isinstance(node, ast.Import | ast.ImportFrom) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def test_the_server_side_imports_only_the_sampling_table_of_the_engine(house):
    found = {
        (m.name.split(".")[1], target)
        for m in house.modules.values()
        for target, _ in house.inner_imports(m)
        if m.name.startswith(("flambeau.frontend", "flambeau.wire")) and target.startswith("flambeau.llm")
    }
    assert {target for _, target in found} == {"flambeau.llm.sampling_params"}


def test_the_sampling_table_loads_without_torch():
    program = "import flambeau.llm.sampling_params, flambeau.wire.generation, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
WALK = re.compile(r"## The walk of (.*?)\n\n```\n(.*?)```\n\n(\d+) steps, (\d+) files", re.DOTALL)


@pytest.mark.parametrize(("steps", "num_steps", "num_files"), [match[1:] for match in WALK.findall(ARCHITECTURE)])
def test_the_walks_of_the_architecture_exist_and_are_as_long_as_it_says(house, steps, num_steps, num_files):
    found = walk(house, re.findall(r"[\w.]+:[\w.]+|~", steps))
    assert "NOT FOUND" not in found
    assert found.splitlines()[-1].startswith(f"{num_steps} steps, ")
    assert f" {num_files} files, 2 process boundaries" in found.splitlines()[-1]


def test_the_architecture_shows_two_walks_on_two_screens():
    assert len(WALK.findall(ARCHITECTURE)) == 2
    assert len(ARCHITECTURE.splitlines()) <= 150
