"""What kernels that start early may read before they wait: only what no kernel of the step before them writes.

The CUDA products of several rows let the next kernel start before they wait themselves, so that not even the results of
the kernel before the last one are there. Triton's interpreter starts one kernel after another and shows none of this.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import flambeau.llm.backends.cuda as package

FOLDER = Path(package.__path__[0])
WAIT = "wait_for_previous"
WEIGHTS = {"weight", "other", "more", "scale", "scales", "minimum", "factor", "table", "bias", "gain", "after_gain"}
WEIGHTS |= {"time_bias", "decay", "skip", "gate", "cos", "sin", "a", "b"}  # of routers; tables; adapters
WEIGHTS |= {"before_a", "before_b", "down_a"}
INPUTS = {"slots", "positions", "starts", "sequences", "places", "tables", "tiles"}
# The first product of experts, which waits before it lets the second one start, comes between.
EXCEPTIONS = {"down_one_row": {"chosen"}, "down_early": {"chosen", "weights"}}


def kernels():
    """The kernels that may start early: their functions by name."""
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name != WAIT and any(map(is_wait, node.body)):
                yield pytest.param(node, id=f"{path.stem}.{node.name}")


def is_wait(statement):
    return (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and name_of(statement.value) == WAIT
    )


def name_of(call):
    return ast.unparse(call.func)


def pointers(node, known):
    """The arguments whose addresses an expression uses."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return {name for name in names if name.endswith("_ptr")}.union(*(known.get(name, set()) for name in names))


@pytest.mark.parametrize("kernel", [*kernels()])
def test_kernels_read_weights_and_inputs_only_before_they_wait(kernel):
    allowed = {f"{name}_ptr" for name in WEIGHTS | INPUTS | EXCEPTIONS.get(kernel.name, set())}
    addresses = {}  # of variables
    for statement in kernel.body[: next(i for i, each in enumerate(kernel.body) if is_wait(each))]:
        calls = [call for call in ast.walk(statement) if isinstance(call, ast.Call)]
        assert not any(name_of(call) == "tl.store" or name_of(call).startswith("tl.atomic") for call in calls)
        loads = [call for call in calls if "load" in name_of(call) or name_of(call) == "span_of"]
        read = set().union(*(pointers(load, addresses) for load in loads))
        assert read <= allowed, f"{sorted(read - allowed)} may not be there yet"
        for part in ast.walk(statement):
            if isinstance(part, ast.Assign) and not any(call in loads for call in ast.walk(part.value)):
                names = (name for target in part.targets for name in ast.walk(target) if isinstance(name, ast.Name))
                addresses |= {name.id: pointers(part.value, addresses) for name in names}


def test_kernels_that_may_start_early_wait():
    """In all of their programs: a wait inside of a branch is not found here."""
    found = {parameter.values[0].name for parameter in kernels()}
    for path in FOLDER.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            has_option = isinstance(node, ast.FunctionDef) and "OVERLAPS" in {each.arg for each in node.args.args}
            assert not has_option or node.name in {*found, WAIT}, f"{path.stem}.{node.name}"
