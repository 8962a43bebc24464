"""Exported encoders of other shapes than the usual."""

from __future__ import annotations

import pytest

from flambeau.errors import HandlerError

np = pytest.importorskip("numpy")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402

from flambeau.handlers.embedding.encoders import OnnxEncoder  # noqa: E402
from support.onnx_models import save, value  # noqa: E402

DIMS = ["batch", "sequence"]


def test_sentence_vectors_of_the_model_are_used(tmp_path):
    nodes = [
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["mask", "mask"], ["sentence_embedding"]),
        helper.make_node("Identity", ["mask"], ["first_output"]),
    ]
    inputs = [value("attention_mask", DIMS, TensorProto.INT64), value("token_type_ids", DIMS, TensorProto.INT64)]
    outputs = [value("first_output", DIMS), value("sentence_embedding", DIMS)]
    encoder = OnnxEncoder(save(tmp_path / "model.onnx", nodes, inputs, outputs, {}), ("mean",), None)
    mask = np.array([[True, False], [True, True]])
    assert encoder.embed(np.ones((2, 2), np.int64), mask).tolist() == [[2, 0], [2, 2]]


def test_input_that_no_tokenizer_gives_fails_the_load(tmp_path):
    nodes = [helper.make_node("Identity", ["pixel_values"], ["y"])]
    path = save(tmp_path / "model.onnx", nodes, [value("pixel_values", DIMS)], [value("y", DIMS)], {})
    with pytest.raises(HandlerError, match=r"model\.onnx takes pixel_values"):
        OnnxEncoder(path, ("mean",), None)
