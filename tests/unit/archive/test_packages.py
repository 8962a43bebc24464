"""What built-in handlers need, and what is said where it is missing."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

from flambeau.archive.manifest import BUILT_IN
from flambeau.archive.packages import (
    CPU_INDEX,
    EXTRAS,
    NEEDS,
    distribution_of,
    explain_missing,
    find_missing,
    is_installed,
)

ROOT = Path(__file__).parents[3]
OFFERED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

OWN = {"flambeau", "msgspec", "yaml"}  # every installation has them
LATER = {"transformers", "onnxruntime", "tokenizers", "nvidia.dali"}  # imported when the model is loaded


def imported(module, seen):
    """The modules that an import of `module` imports at once, through the modules of this package."""
    if module in seen:
        return set()
    seen.add(module)
    path = ROOT.joinpath("src", *module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    found = set()
    for node in statements(ast.parse(file.read_text()).body):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
        for name in names:
            found |= imported(name, seen) if name.startswith("flambeau.") else {name.partition(".")[0]}
    return found


def statements(body):
    """The import statements that run when a file is imported; not those for type checkers."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.Try):
            yield from statements(node.body)


def test_every_built_in_handler_has_an_entry():
    assert NEEDS.keys() == BUILT_IN.keys()


@pytest.mark.parametrize("handler", BUILT_IN)
def test_what_a_handler_imports_at_once_is_what_it_needs(handler):
    found = imported(BUILT_IN[handler].partition(":")[0], set()) - OWN - sys.stdlib_module_names
    needs = {*NEEDS[handler].modules}
    assert found <= needs
    assert needs - found <= LATER


@pytest.mark.parametrize("group", [group for group in NEEDS.values() if group.extra], ids=lambda group: group.extra)
def test_extra_of_a_handler_has_what_it_needs(group):
    offered = {line.partition(">")[0] for line in OFFERED[group.extra]}
    assert {distribution_of(module) for module in group.modules} <= offered


@pytest.mark.parametrize("module", EXTRAS)
def test_extra_of_a_module_has_it(module):
    assert distribution_of(module) in {line.partition(">")[0] for line in OFFERED[EXTRAS[module]]}


def test_module_beside_the_model_or_in_its_environment_counts_as_installed(tmp_path):
    (tmp_path / "rare_module.py").touch()
    assert is_installed("rare_module", [str(tmp_path)])
    assert find_missing(["json", "rare_module", "rare.submodule"], []) == ["rare_module", "rare.submodule"]


@pytest.mark.parametrize("has_cpu_torch", [False, True])
def test_sentence_names_the_distributions_and_the_command(has_cpu_torch, monkeypatch):
    monkeypatch.setattr("flambeau.archive.packages.has_cpu_torch", lambda: has_cpu_torch)
    text = explain_missing("image_classifier", ["torchvision", "PIL"], "vision")
    assert text == (
        "image_classifier needs torchvision, pillow, which are not installed: pip install 'flambeau[vision]'"
        + (CPU_INDEX if has_cpu_torch else "")
    )
    assert explain_missing("it", ["numpy"]) == "it needs numpy, which is not installed: pip install numpy"
