"""The steps of a sentence-transformers folder between pooling and the vector: Dense, LayerNorm and Normalize."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flambeau.errors import HandlerError
from flambeau.handlers.embedding.small_documents import read_json
from flambeau.handlers.onnx.npy import Array

Step = Callable[[Array], Array]
TINY = 1e-12
ERF = np.vectorize(math.erf, otypes=[np.float32])
ACTIVATIONS: Mapping[str, Step] = {  # by the names of torch's classes
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "SiLU": lambda x: x / (1 + np.exp(-x)),
    "GELU": lambda x: 0.5 * x * (1 + ERF(x / math.sqrt(2))),
}
DENSE_KEYS = ("in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name")
VECTOR = "sentence_embedding"  # what the steps read and write; token_embeddings are for models with many vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseStep:
    """A linear layer with an activation; the input may be added to the result."""

    weight_OI: Array
    bias_O: Array | None
    activate: Step
    residual_OI: Array | None = None
    adds_input: bool = False

    def __call__(self, x_BI: Array) -> Array:
        x_BO = x_BI @ self.weight_OI.T
        x_BO = self.activate(x_BO if self.bias_O is None else x_BO + self.bias_O)
        if self.residual_OI is not None:
            return np.asarray(x_BO + x_BI @ self.residual_OI.T)
        return np.asarray(x_BO + x_BI if self.adds_input else x_BO)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormStep:
    weight_D: Array
    bias_D: Array

    def __call__(self, x_BD: Array) -> Array:
        centered = x_BD - x_BD.mean(1, keepdims=True)
        normed = centered / np.sqrt((centered * centered).mean(1, keepdims=True) + 1e-5)
        return np.asarray(normed * self.weight_D + self.bias_D)


def scale_to_one(x_BD: Array) -> Array:
    length = np.sqrt((x_BD * x_BD).sum(1, keepdims=True))
    return np.asarray(x_BD / np.maximum(length, TINY))


def read_step(kind: str, folder: Path) -> Step | None:
    """A step of modules.json; None for one that changes nothing."""
    if kind == "Dropout":
        return None
    document = read_json(folder / "config.json")
    for key in ("module_input_name", "module_output_name"):
        if document.get(key) not in (None, VECTOR):
            raise HandlerError(
                f"the step {folder.name} ({kind}) works on {document[key]}, not on {VECTOR}: not supported"
            )
    if kind == "Normalize":
        return scale_to_one
    tensors = read_tensors(folder)
    return (
        read_dense(folder.name, document, tensors)
        if kind == "Dense"
        else NormStep(weight_D=take(tensors, "norm.weight", folder), bias_D=take(tensors, "norm.bias", folder))
    )


def read_dense(name: str, document: Mapping[str, Any], tensors: Mapping[str, Array]) -> DenseStep:
    if unknown := sorted(key for key, value in document.items() if key not in (*DENSE_KEYS, "use_residual") and value):
        raise HandlerError(f"the step {name} (Dense) has {', '.join(unknown)}, which are not supported")
    path = str(document.get("activation_function", "torch.nn.modules.activation.Tanh"))
    module, _, activation = path.rpartition(".")
    if not module.startswith("torch.nn") or activation not in ACTIVATIONS:
        raise HandlerError(f"the step {name} (Dense) has the activation {path}; supported: {', '.join(ACTIVATIONS)}")
    has_bias, adds_input = document.get("bias", True), document.get("use_residual", False)
    weight = take(tensors, "linear.weight", Path(name))
    check_sizes(name, document, weight)
    is_square = weight.shape[0] == weight.shape[1]
    return DenseStep(
        weight_OI=weight,
        bias_O=take(tensors, "linear.bias", Path(name)) if has_bias else None,
        activate=ACTIVATIONS[activation],
        residual_OI=take(tensors, "residual.weight", Path(name)) if adds_input and not is_square else None,
        adds_input=adds_input,
    )


def check_sizes(name: str, document: Mapping[str, Any], weight_OI: Array) -> None:
    """Raise unless the sizes in config.json, if it has any, are those of the weights."""
    if weight_OI.ndim != 2:
        raise HandlerError(f"linear.weight of the step {name} (Dense) has the shape {weight_OI.shape}, not two sizes")
    for key, size in zip(("out_features", "in_features"), weight_OI.shape, strict=True):
        if document.get(key, size) != size:
            raise HandlerError(
                f"config.json of the step {name} (Dense) has {key} {document[key]!r}, but its weights have {size}; "
                "they belong to different models, download the folder whole"
            )


def take(tensors: Mapping[str, Array], name: str, folder: Path) -> Array:
    if name not in tensors:
        raise HandlerError(
            f"the weights of the step {folder.name} lack {name}; they have {', '.join(tensors) or 'none'}"
        )
    return tensors[name]


def read_tensors(folder: Path) -> dict[str, Array]:
    """All tensors of a folder's model.safetensors or pytorch_model.bin, in float32."""
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    try:
        if safe.is_file():
            from safetensors import safe_open

            with safe_open(safe, framework="np") as file:
                return {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118
        if pickled.is_file():
            import torch

            loaded = torch.load(pickled, map_location="cpu", weights_only=True)
            return {name: tensor.float().numpy() for name, tensor in loaded.items()}
    except TypeError:  # NumPy has no bfloat16
        from safetensors.torch import load_file

        return {name: tensor.float().numpy() for name, tensor in load_file(safe).items()}
    except Exception as error:  # safetensors and pickles have errors of their own
        raise HandlerError(f"the weights in {folder.name} could not be loaded: {error}") from error
    raise HandlerError(
        f"there is no model.safetensors or pytorch_model.bin in {folder}; the step {folder.name} in modules.json needs "
        "it, download the model's folder whole"
    )
