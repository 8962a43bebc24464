from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flambeau.errors import HandlerError
from flambeau.handlers.loaders.programs import load_whole
from flambeau.handlers.loaders.torch_export import CodeFound, check_expression, check_guard, check_names, load_exported
from support.hostile_programs import HOSTILE_PROGRAMS, touch, write_hostile_program, write_program

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, at its own older parts


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return write_program(tmp_path_factory.mktemp("program") / "net.pt2")


@pytest.mark.parametrize("way", HOSTILE_PROGRAMS)
def test_program_with_code_is_rejected_and_does_not_run_it(tmp_path, program, way):
    file = write_hostile_program(tmp_path / "net.pt2", program, way, tmp_path / "mark")
    with pytest.raises(HandlerError, match=r"net\.pt2 holds more than a program .*weights_only: false"):
        load_exported(file, CPU)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("way", HOSTILE_PROGRAMS)
def test_these_programs_would_run_it(tmp_path, program, way):
    """Else the test above could not fail."""
    file = write_hostile_program(tmp_path / "net.pt2", program, way, tmp_path / "mark")
    try:
        load_exported(file, CPU, weights_only=False)(torch.zeros(2, 4), *["x"] * (way == "example_text"))
    except Exception:
        pass  # it has run by then
    assert (tmp_path / "mark").exists()


def test_program_without_code_is_loaded_and_called(program):
    model = load_exported(program, CPU)
    assert model(torch.zeros(3, 4)).shape == (3, 3)


class Halves(torch.nn.Module):
    def forward(self, x, options):
        torch._check(x.shape[0] % 2 == 0)
        return {"two words": x.view(x.shape[0] // 2, -1).sum(1) + options["k"].sum(), "rest": x[: x.shape[0] - 1]}


def test_guards_shapes_and_keys_of_real_programs_are_accepted(tmp_path):
    auto = torch.export.Dim.AUTO
    example_inputs = (torch.zeros(4, 4), {"k": torch.zeros(4)})
    exported = torch.export.export(Halves(), example_inputs, dynamic_shapes=({0: auto}, {"k": {0: auto}}))
    torch.export.save(exported, tmp_path / "halves.pt2")
    assert load_exported(tmp_path / "halves.pt2", CPU)(*example_inputs)["two words"].shape == (2,)


@pytest.mark.parametrize(
    "text",
    [
        "s0",
        "2*s0 + 1",
        "Symbol('s77', positive=True, integer=True)",
        "Mul(Integer(4), FloorDiv(Symbol('s77', positive=True), Integer(2)))",
        "Max(1, s0) // 2",
        "-int_oo",
    ],
)
def test_arithmetic_is_an_expression(text):
    check_expression(text, {"FloorDiv": None})


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "().__class__",
        "s0.subs",
        "eval('1')",
        "Add('__import__(\"os\")')",
        "(lambda: 1)()",
        "[x for x in s0]",
        "f'{s0}'",
        "s0; s1",
        "s0\ns1",
        "sympify('exit')",
        "lambdify(s0, s0)",
        "(" * 500 + ")" * 500,
        "1+" * 20_000 + "1",
        "",
    ],
)
def test_other_python_is_none(text):
    with pytest.raises(CodeFound):
        check_expression(text, {})
    with pytest.raises(CodeFound):
        check_guard(text)


@pytest.mark.parametrize("text", ["torch.os", "math.__loader__", "L['x'].size.__globals__", "L['x'].to('meta')"])
def test_guards_reach_no_other_attributes(text):
    with pytest.raises(CodeFound):
        check_guard(text)


FRAGMENTS = ["s0", "(", ")", ".", "__import__", "'os'", "eval", "Max", "Symbol", ",", "1", "+", "lambda", ":", "[", "]"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12).map(" ".join))
@example("Max ( __import__ )")
def test_no_accepted_text_reaches_an_attribute_or_a_function_of_python(text):
    try:
        check_expression(text, {})
    except CodeFound:
        return
    assert not {"__import__", "lambda", "."} & {*text.split()}
    assert "eval (" not in text


json_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=8), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@settings(max_examples=100, deadline=None)
@given(json_values, st.sampled_from(["name", "as_name", "in_spec", "new_field"]))
def test_code_is_found_in_any_place_of_a_document(value, key):
    with pytest.raises(CodeFound):
        check_names([value, {key: [{"inner": touch(key)}]}], "models/model.json")


class TestSafeWeights:
    @pytest.fixture(autouse=True)
    def safe(self, monkeypatch):
        monkeypatch.setenv("FLAMBEAU_SAFE_WEIGHTS", "true")

    def test_programs_are_rejected(self, tmp_path, program):
        torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "net.pt")
        for file in (program, tmp_path / "net.pt"):
            with pytest.raises(HandlerError, match=r"can run code, .*safe_weights"):
                load_whole(file, CPU)

    def test_a_caller_that_trusts_the_file_is_overruled(self, tmp_path):
        torch.save(torch.nn.Linear(2, 2), tmp_path / "net.pt")
        with pytest.raises(HandlerError, match="holds more than weights"):
            load_whole(tmp_path / "net.pt", CPU, weights_only=False)
