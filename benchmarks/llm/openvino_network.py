"""A Llama network as an OpenVINO model with its KV cache as state, from the checkpoint of the benchmark.

It has the operations of models that OpenVINO's own tools export, so that its CPU plugin recognizes attention, the cache
and compressed weights. Weights: float32 and bfloat16 as they are; int8 with a scale for each output; int4 with a scale
and a zero for each group of 64, and 8 bits in the last layer: the defaults of its tools.

Shapes: B sequences · T new tokens · S tokens of a sequence · H heads · G key-value heads · D head size
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

GROUP = 64
PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}  # of numbers and of the cache; else the plugin's choice


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json, and all tensors as float32."""
    data = np.memmap(folder / "model.safetensors", dtype=np.uint8, mode="r")
    (size,) = struct.unpack("<Q", data[:8].tobytes())
    entries = json.loads(data[8 : 8 + size].tobytes())
    entries.pop("__metadata__", None)
    found = {}
    for name, entry in entries.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            numbers = (data[begin:end].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            numbers = data[begin:end].view(np.float32)
        found[name] = numbers.reshape(entry["shape"])
    return json.loads((folder / "config.json").read_text()), found


def constant(array: np.ndarray) -> Any:
    return op.constant(np.asarray(array, order="C"))


def compressed8(weight: np.ndarray) -> Any:
    """Integers with a scale for each output."""
    scale = np.maximum(np.abs(weight).max(axis=1, keepdims=True) / 127, 1e-12).astype(np.float16)
    levels = np.clip(np.rint(weight / scale.astype(np.float32)), -127, 127).astype(np.int8)
    scaled = op.multiply(op.convert(constant(levels), "f16"), constant(scale))
    return op.convert(scaled, "f32")


def compressed4(weight: np.ndarray) -> Any:
    """Sixteen levels, and a scale and a zero for each group."""
    groups = weight.reshape(len(weight), -1, GROUP)
    low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    scale = np.maximum((high - low) / 15, 1e-12).astype(np.float16)
    zero = np.clip(np.rint(-low / scale.astype(np.float32)), 0, 15).astype(np.uint8)
    levels = np.clip(np.rint(groups / scale.astype(np.float32)) + zero, 0, 15).astype(np.uint8)
    difference = op.subtract(op.convert(four_bits(levels), "f16"), op.convert(four_bits(zero), "f16"))
    scaled = op.multiply(difference, constant(scale))
    return op.convert(op.reshape(scaled, constant(np.array(weight.shape)), False), "f32")


def four_bits(levels: np.ndarray) -> Any:
    flat = levels.reshape(-1)
    tensor = ov.Tensor(ov.Type.u4, ov.Shape(levels.shape))  # of memory that the constant keeps
    tensor.data.reshape(-1)[:] = flat[0::2] | flat[1::2] << 4
    return op.constant(tensor)


class NetworkBuilder:
    """Builds the graph from the inputs to the logits of the last tokens."""

    def __init__(self, config: dict[str, Any], weights: dict[str, np.ndarray], kind: str) -> None:
        self._weights, self._kind = weights, kind
        self._heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._head_size = config["hidden_size"] // self._heads
        self._epsilon, self._num_layers = config["rms_norm_eps"], config["num_hidden_layers"]
        self._ids = op.parameter([-1, -1], ov.Type.i64, name="input_ids")
        self._mask = op.parameter([-1, 1, -1, -1], ov.Type.f32, name="attention_mask")
        self._cos = op.parameter([1, 1, -1, self._head_size], ov.Type.f32, name="cos")
        self._sin = op.parameter([1, 1, -1, self._head_size], ov.Type.f32, name="sin")
        self._order = op.parameter([-1], ov.Type.i32, name="beam_idx")
        self._states: list[Any] = []

    def build(self) -> ov.Model:
        table = self._weights["model.embed_tokens.weight"]
        numbers = constant(table.astype(np.float16)) if self._kind != "float32" else constant(table)
        rows = numbers if self._kind == "float32" else op.convert(numbers, "f32")
        x = op.gather(rows, self._ids, constant(np.array(0)))
        for layer in range(self._num_layers):
            prefix = f"model.layers.{layer}"
            x = op.add(x, self._attention(self._norm(x, f"{prefix}.input_layernorm"), prefix, layer))
            x = op.add(x, self._mlp(self._norm(x, f"{prefix}.post_attention_layernorm"), f"{prefix}.mlp"))
        last = op.slice(x, *(constant(np.array([n])) for n in (-1, np.iinfo(np.int64).max, 1, 1)))
        head = self._weights.get("lm_head.weight", table)
        logits = self._multiply(self._norm(last, "model.norm"), head, is_last=True)
        parameters = [self._ids, self._mask, self._cos, self._sin, self._order]
        for parameter in parameters:
            parameter.output(0).get_tensor().set_names({parameter.friendly_name})
        return ov.Model([op.result(logits)], self._states, parameters, "llama")

    def _norm(self, x: Any, name: str) -> Any:
        squares = op.reduce_mean(op.power(x, constant(np.float32(2))), constant(np.array([-1])), keep_dims=True)
        inverse = op.divide(constant(np.float32(1)), op.sqrt(op.add(squares, constant(np.float32(self._epsilon)))))
        return op.multiply(op.multiply(x, inverse), constant(self._weights[f"{name}.weight"].reshape(1, 1, -1)))

    def _multiply(self, x: Any, weight: np.ndarray, *, is_last: bool = False) -> Any:
        if self._kind == "int8" or (self._kind == "int4" and is_last):
            numbers = compressed8(weight)
        elif self._kind == "int4":
            numbers = compressed4(weight)
        else:
            numbers = constant(weight)
        return op.matmul(x, numbers, transpose_a=False, transpose_b=True)

    def _linear(self, x: Any, name: str) -> Any:
        return self._multiply(x, self._weights[f"{name}.weight"])

    def _mlp(self, x: Any, name: str) -> Any:
        gate, up = self._linear(x, f"{name}.gate_proj"), self._linear(x, f"{name}.up_proj")
        return self._linear(op.multiply(op.swish(gate), up), f"{name}.down_proj")

    def _by_heads(self, x: Any, heads: int) -> Any:
        """[B, T, H times D] to [B, H, T, D]."""
        apart = op.reshape(x, constant(np.array([0, 0, heads, self._head_size])), True)
        return op.transpose(apart, constant(np.array([0, 2, 1, 3])))

    def _rotated(self, x: Any) -> Any:
        half = self._head_size // 2
        parts = op.variadic_split(x, constant(np.array(3)), constant(np.array([half, half])))
        first, second = parts.outputs()
        minus = constant(np.full((1, 1, 1, 1), -1, dtype=np.float32))
        turned = op.concat([op.multiply(second, minus), first], 3)
        return op.add(op.multiply(x, self._cos), op.multiply(turned, self._sin))

    def _cached(self, new: Any, name: str) -> Any:
        """All keys or values [B, G, S, D] of the sequences; the new ones are added to the state."""
        batch = op.gather(op.shape_of(self._ids), constant(np.array([0])), constant(np.array(0)))
        rest = constant(np.array([self._kv_heads, 0, self._head_size], dtype=np.int64))
        empty = op.broadcast(constant(np.float32(0)), op.concat([batch, rest], 0))
        shape = [-1, self._kv_heads, -1, self._head_size]
        past = op.read_value(empty, name, ov.Type.f32, ov.PartialShape(shape))
        whole = op.concat([op.gather(past, self._order, constant(np.array(0))), new], 2)
        self._states.append(op.assign(whole, name))
        return whole

    def _for_all_heads(self, x: Any) -> Any:
        """[B, G, S, D] to [B, H, S, D]."""
        times = self._heads // self._kv_heads
        if times == 1:
            return x
        apart = op.unsqueeze(x, constant(np.array(2)))
        repeated = op.broadcast(apart, constant(np.array([1, 1, times, 1, 1])), broadcast_spec="BIDIRECTIONAL")
        return op.reshape(repeated, constant(np.array([0, self._heads, -1, self._head_size])), True)

    def _attention(self, x: Any, prefix: str, layer: int) -> Any:
        name = f"{prefix}.self_attn"
        q = self._rotated(self._by_heads(self._linear(x, f"{name}.q_proj"), self._heads))
        k = self._rotated(self._by_heads(self._linear(x, f"{name}.k_proj"), self._kv_heads))
        v = self._by_heads(self._linear(x, f"{name}.v_proj"), self._kv_heads)
        keys, values = (
            self._cached(k, f"past_key_values.{layer}.key"),
            self._cached(v, f"past_key_values.{layer}.value"),
        )
        keys, values = self._for_all_heads(keys), self._for_all_heads(values)
        attended = op.scaled_dot_product_attention(q, keys, values, self._mask)
        back = op.transpose(attended, constant(np.array([0, 2, 1, 3])))
        return self._linear(op.reshape(back, constant(np.array([0, 0, -1])), True), f"{name}.o_proj")


class OpenVinoNetwork:
    """A compiled network; all sequences of a call have the same length."""

    def __init__(self, folder: Path, kind: str, threads: int) -> None:
        config, weights = read_checkpoint(folder)
        self.vocab_size, self._head_size = config["vocab_size"], config["hidden_size"] // config["num_attention_heads"]
        self._theta = config["rope_theta"]
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
        if kind in PRECISIONS:
            options |= {"INFERENCE_PRECISION_HINT": PRECISIONS[kind], "KV_CACHE_PRECISION": PRECISIONS[kind]}
        model = NetworkBuilder(config, weights, kind).build()
        constants = (node for node in model.get_ops() if node.get_type_name() == "Constant")
        self.weight_bytes = sum(node.get_byte_size() for node in constants)
        self.compiled = ov.Core().compile_model(model, "CPU", options)
        self._request, self._length = self.compiled.create_infer_request(), 0

    def reset(self) -> None:
        self._request.reset_state()
        self._length = 0

    def logits(self, ids_BT: np.ndarray) -> np.ndarray:
        """Add tokens to the sequences; the logits [B, V] after the last."""
        batch, count = ids_BT.shape
        places = np.arange(self._length, self._length + count)
        frequencies = self._theta ** (-np.arange(0, self._head_size, 2) / self._head_size)
        angles = np.concatenate([np.outer(places, frequencies)] * 2, axis=1)[None, None].astype(np.float32)
        self._length += count
        hidden = np.arange(self._length)[None, :] > places[:, None]
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
        inputs = {
            "input_ids": ids_BT.astype(np.int64),
            "attention_mask": np.broadcast_to(mask, (batch, 1, *mask.shape)).copy(),
            "cos": np.cos(angles),
            "sin": np.sin(angles),
            "beam_idx": np.arange(batch, dtype=np.int32),
        }
        found = self._request.infer(inputs, share_inputs=True, share_outputs=True)
        logits: np.ndarray = next(iter(found.values()))[:, -1]
        return logits
