"""Tiny ONNX models, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Dims = Sequence[int | str | None]


def value(name: str, dims: Dims, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, dims)


def save(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: dict[str, Any]) -> Path:
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def save_affine(path: Path, batch: int | str = "batch") -> Path:
    """x (batch, 3) → y (batch, 2): [x0 + 2 x2, 3 x1 + 2 x2 + 1]."""
    weight = np.array([[1, 0], [0, 3], [2, 2]], np.float32)
    nodes = [helper.make_node("Gemm", ["x", "weight", "bias"], ["y"])]
    constants = {"weight": weight, "bias": np.array([0, 1], np.float32)}
    return save(path, nodes, [value("x", [batch, 3])], [value("y", [batch, 2])], constants)


def save_sum_and_difference(path: Path) -> Path:
    """a, b (batch, width) → sum, difference."""
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])]
    dims = ["batch", "width"]
    return save(path, nodes, [value("a", dims), value("b", dims)], [value("sum", dims), value("difference", dims)], {})


def save_identity(path: Path, kind: int, dims: Dims) -> Path:
    """x → y, of any type and shape."""
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    return save(path, nodes, [value("x", dims, kind)], [value("y", dims, kind)], {})
