"""Requests of equal shapes run together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

np = pytest.importorskip("numpy")

from flambeau.handlers.onnx.handler import group_by_shape, has_batch_axis, join, split, without_batch_axis  # noqa: E402
from flambeau.handlers.onnx.inputs import RequestArrays, read_specs  # noqa: E402


def value(shape, kind="tensor(float)"):
    return SimpleNamespace(name="x", type=kind, shape=shape)


def example(*shape: int) -> RequestArrays:
    return RequestArrays(arrays={"x": np.full(shape, shape[0])}, is_single=False)


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        ([["batch", 3]], [["batch", 2]], True),
        ([[None, 3]], [["Gemm_dim_0", 2]], True),
        ([["N", 3], ["N"]], [["N"]], True),
        ([[1, 3]], [["batch", 2]], False),
        ([["batch", 3]], [[1, 2]], False),
        ([["batch", 3]], [[]], False),
        ([["batch", 3], []], [["batch"]], False),
        ([["batch", 3], ["other"]], [["batch"]], False),
        ([["sequence_length", 3]], [["sequence_length"]], False),
        ([], [["batch"]], False),
    ],
)
def test_rows_are_joined_only_along_an_axis_of_examples(inputs, outputs, expected):
    assert bool(has_batch_axis(read_specs([value(i) for i in inputs]), [value(o) for o in outputs])) is expected


def test_outputs_that_are_no_tensors_are_not_joined():
    assert not has_batch_axis(read_specs([value(["n"])]), [value(["n"], "seq(map(int64,tensor(float)))")])


def test_alike_requests_are_joined_and_split_back():
    examples = [example(1, 3), example(2, 4), example(3, 3)]
    assert group_by_shape(examples) == [[0, 2], [1]]
    group = [examples[0], examples[2]]
    joined = join(group)["x"]
    assert joined[:, 0].tolist() == [1, 3, 3, 3]
    parts = split([joined * 10], group)
    assert [part[0][:, 0].tolist() for part in parts] == [[10], [30, 30, 30]]
    assert split([joined.sum(0)], group) is None
    assert split([np.array(1.0)], group) is None


def test_inputs_of_uneven_rows_stay_alone():
    uneven = RequestArrays(arrays={"a": np.ones((1, 2)), "b": np.ones((3, 2))}, is_single=False)
    assert group_by_shape([uneven, uneven]) == [[0], [1]]


def test_one_example_is_answered_without_the_axis():
    assert without_batch_axis(np.ones((1, 2))).shape == (2,)
    assert without_batch_axis(np.ones((2, 1))).shape == (2, 1)
    assert without_batch_axis(np.array(5.0)).shape == ()
    assert without_batch_axis([{"yes": 1.0}]) == {"yes": 1.0}
