from __future__ import annotations

import io

import pytest
import torch

from flambeau.errors import BadRequest
from flambeau.handlers.tensor_io import client_error_reason, client_errors, to_example, to_rows, to_tensor


def test_rows_become_one_tensor():
    rows = [{"body": [1.0, 2.0]}, {"data": b"[3, 4.5]"}]
    assert torch.equal(to_tensor(rows, torch.device("cpu")), torch.tensor([[1.0, 2.0], [3.0, 4.5]]))


def test_values_of_an_envelope_are_unchanged():
    assert to_tensor([[1, 2], [3, 4]], None).shape == (2, 2)
    tensor = torch.zeros(3)
    assert to_tensor(tensor, torch.device("cpu")) is tensor


def test_npy_bytes_are_numbers():
    numpy = pytest.importorskip("numpy")
    buffer = io.BytesIO()
    numpy.save(buffer, numpy.arange(3, dtype="float32"))
    assert torch.equal(to_example(bytearray(buffer.getvalue())), torch.tensor([0.0, 1.0, 2.0]))


@pytest.mark.parametrize(
    "content", [b"", "", None, b"nope", "{", {"a": 1}, ["x"], [[1], [2, 3]], [float("nan")], [float("inf")], b"[NaN]"]
)
def test_input_that_is_not_a_tensor_is_a_client_error(content):
    with pytest.raises(BadRequest):
        to_tensor([{"body": content}], None)


def test_zero_is_an_input():
    assert torch.equal(to_tensor([{"data": 0, "body": None}], None), torch.tensor([0]))


def test_shapes_of_a_batch_must_agree():
    with pytest.raises(BadRequest, match=r"must have the same shape, not \(2,\), \(3,\)"):
        to_tensor([{"body": [1, 2]}, {"body": [1, 2, 3]}], None)


def test_outputs_of_any_form_become_rows():
    scores, boxes = torch.tensor([0.5, 0.25]), torch.tensor([[1, 2], [3, 4]])
    assert to_rows(boxes) == [[1, 2], [3, 4]]
    assert to_rows((scores, boxes)) == [[0.5, [1, 2]], [0.25, [3, 4]]]
    assert to_rows({"scores": scores, "boxes": boxes}) == [
        {"scores": 0.5, "boxes": [1, 2]},
        {"scores": 0.25, "boxes": [3, 4]},
    ]


def error_of(call) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.nn.Linear(4, 3)(torch.zeros(2, 5)),
        lambda: torch.nn.Linear(4, 3)(torch.zeros(2, 4, dtype=torch.int64)),
        lambda: torch.nn.Conv2d(3, 8, 3)(torch.zeros(1, 4, 9, 9)),
        lambda: torch.nn.Conv2d(3, 8, 3)(torch.zeros(9)),
        lambda: torch.nn.Conv2d(3, 8, 3)(torch.zeros(1, 3, 2, 2)),
        lambda: torch.nn.BatchNorm1d(3).eval()(torch.zeros(2, 4)),
        lambda: torch.nn.LayerNorm(5)(torch.zeros(2, 4)),
        lambda: torch.stack([torch.zeros(2), torch.zeros(3)]),
        lambda: torch.zeros(2, 3) + torch.zeros(2, 4),
        lambda: torch.nn.Embedding(9, 2)(torch.zeros(2)),
    ],
)
def test_complaints_about_shapes_and_types_are_recognized(call):
    assert "shape or type" in client_error_reason(error_of(call))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("the disk is full"), KeyError("x"), torch.OutOfMemoryError("CUDA out of memory"), ValueError()],
)
def test_other_errors_are_not_client_errors(error):
    assert client_error_reason(error) is None
    with pytest.raises(type(error)), client_errors():
        raise error
