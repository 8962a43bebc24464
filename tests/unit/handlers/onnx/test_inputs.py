"""A request's value → arrays for a session."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flambeau.errors import BadRequest, HandlerError

np = pytest.importorskip("numpy")

from flambeau.handlers.onnx.inputs import InputLimits, read_request_arrays, read_specs  # noqa: E402
from flambeau.handlers.onnx.npy import write_npy, write_npz  # noqa: E402

NUMBERS = InputLimits()


def specs(**inputs):
    declared = [SimpleNamespace(name=name, type=kind, shape=shape) for name, (kind, shape) in inputs.items()]
    return read_specs(declared)


ONE = specs(x=("tensor(float)", ["batch", 3]))
TWO = specs(ids=("tensor(int64)", ["batch", None]), scale=("tensor(float)", []))


def test_number_of_axes_distinguishes_a_batch_from_one_example():
    batch = read_request_arrays([[1, 2, 3], [4, 5, 6]], ONE, NUMBERS)
    assert not batch.is_single
    assert batch.arrays["x"].shape == (2, 3)
    single = read_request_arrays([1, 2, 3.5], ONE, NUMBERS)
    assert single.is_single
    assert single.arrays["x"].shape == (1, 3)
    assert single.arrays["x"].dtype == np.float32


@pytest.mark.parametrize(
    "value",
    [
        [1, 2, 3],
        {"x": [1, 2, 3]},
        {"inputs": [1, 2, 3]},
        {"inputs": {"x": [1, 2, 3]}},
        json.dumps({"x": [1, 2, 3]}).encode(),
        write_npy(np.array([1.0, 2.0, 3.0])),
        write_npz({"x": np.array([1, 2, 3], ">i2")}),
        {"x": bytearray(write_npy(np.array([1, 2, 3], np.uint8)))},  # a form with a file for each input
    ],
)
def test_every_spelling_means_the_same(value):
    assert read_request_arrays(value, ONE, NUMBERS).arrays["x"].tolist() == [[1, 2, 3]]


def test_inputs_without_a_batch_axis_stay_as_they_are():
    example = read_request_arrays({"ids": [1, 2], "scale": 0.5}, TWO, NUMBERS)
    assert example.is_single
    assert example.arrays["ids"].shape == (1, 2)
    assert example.arrays["scale"].shape == ()
    fixed = specs(image=("tensor(uint8)", [1, 2, 2]), state=("tensor(float)", [2, None]))
    example = read_request_arrays({"image": [[0, 1], [2, 255]], "state": [[1], [2]]}, fixed, NUMBERS)
    assert (example.arrays["image"].shape, example.arrays["state"].shape) == ((1, 2, 2), (2, 1))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1, 2], r"input x takes shape \[batch, 3\], or one example without the first axis; given: \[2\]"),
        ([[[1, 2, 3]]], r"given: \[1, 1, 3\]"),
        (5, r"given: \[\]"),
        ([[1, 2, 3], [4, 5]], "input x is not a rectangular tensor"),
        (["a", "b", "c"], r"input x takes tensor\(float\); given: text"),
        ([True, False, True], "given: bool"),
        ([1, None, 3], "given: list"),
        ([], "input x is empty"),
        ([1, 2, float("nan")], "allow_nan"),
        ([1, 2, 1e300], "beyond"),
        ({"y": [1, 2, 3]}, "inputs y unknown and x missing; the model takes x"),
        ({"inputs": [1, 2, 3], "more": 1}, 'a request with "inputs"'),
        (b"[1, 2", "not valid JSON"),
        (b"\xff\xfe\x00", "send JSON"),
    ],
)
def test_invalid_inputs_are_named(value, reason):
    with pytest.raises(BadRequest, match=reason):
        read_request_arrays(value, ONE, NUMBERS)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1, 2], "the model has 2 inputs; send an object with ids, scale"),
        ({"ids": [1, 2]}, "scale missing"),
        ({"ids": [1.5], "scale": 1}, r"input ids takes tensor\(int64\); given: float64"),
        ({"ids": [2**63], "scale": 1}, "given: uint64"),
    ],
)
def test_several_inputs_are_checked_each(value, reason):
    with pytest.raises(BadRequest, match=reason):
        read_request_arrays(value, TWO, NUMBERS)


def test_inputs_must_agree_on_having_a_batch_axis():
    pair = specs(a=("tensor(float)", ["n", 2]), b=("tensor(float)", ["n"]))
    with pytest.raises(BadRequest, match="input b is one example and input a a batch"):
        read_request_arrays({"a": [[1, 2]], "b": 1}, pair, NUMBERS)


def test_other_types_keep_their_kind():
    narrow = specs(x=("tensor(int8)", ["n"]))
    assert read_request_arrays([127, -128], narrow, NUMBERS).arrays["x"].dtype == np.int8
    with pytest.raises(BadRequest, match="int8"):
        read_request_arrays([128], narrow, NUMBERS)
    words = specs(x=("tensor(string)", ["n"]))
    assert read_request_arrays(["a", "ü"], words, NUMBERS).arrays["x"].tolist() == ["a", "ü"]
    with pytest.raises(BadRequest, match="string"):
        read_request_arrays([1], words, NUMBERS)
    flags = specs(x=("tensor(bool)", ["n"]))
    assert read_request_arrays([True], flags, NUMBERS).arrays["x"].dtype == np.bool_
    with pytest.raises(BadRequest, match="bool"):
        read_request_arrays([1], flags, NUMBERS)


def test_nan_is_allowed_by_an_option():
    example = read_request_arrays([1, 2, float("nan")], ONE, InputLimits(allow_nan=True))
    assert np.isnan(example.arrays["x"]).tolist() == [[False, False, True]]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["x", "inputs", "y"]), inner)
)
BYTES = st.binary() | st.binary().map(lambda tail: b"\x93NUMPY\x01\x00" + tail) | st.binary().map(lambda t: b"PK" + t)


@given(JSON | BYTES)
@example([[[]]])
@example([10**400, 1, 2])
@example([[1, 2, 3], None])
def test_whatever_is_sent_is_an_example_or_a_bad_request(value):
    for declared in (ONE, TWO, specs(x=("tensor(string)", ["n"])), specs(x=("tensor(uint8)", [1, "n"]))):
        try:
            found = read_request_arrays(value, declared, NUMBERS)
        except BadRequest:
            continue
        assert [found.arrays[spec.name].dtype for spec in declared] == [spec.dtype for spec in declared]


def test_input_that_no_request_could_carry_fails_the_load():
    with pytest.raises(HandlerError, match=r"input x is seq\(tensor\(float\)\)"):
        specs(x=("seq(tensor(float))", []))


def test_one_long_text_among_many_does_not_blow_up():
    import tracemalloc

    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="given: text"):
            read_request_arrays(["a" * 5000] + [""] * 30_000, ONE, NUMBERS)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
