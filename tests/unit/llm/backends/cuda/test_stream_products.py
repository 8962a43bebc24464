"""Norms within the products around them give what they give apart; how layers use them, by plain products."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.llm_steps import random_model, room, step_inputs

pytest.importorskip("triton", reason="there is no Triton here")

from flambeau.llm.backends.cuda import stream_products
from flambeau.llm.backends.cuda.few_row_kernel import (
    CAPABILITY,
    INT8,
    STREAM_BLOCKS,
    STREAM_PARTS,
    STREAM_ROWS,
    Division,
)
from flambeau.llm.backends.cuda.linear_choice import kernel_linear
from flambeau.llm.backends.cuda.network import CudaNetwork
from flambeau.llm.backends.cuda.norm import NormParameters
from flambeau.llm.backends.cuda.stream_products import joined_norm
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.packed_layers import CudaFp8Linear, CudaInt4Linear
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == CAPABILITY
LAYERS = {
    "int8": Int8Linear.from_linear,
    "fp8": lambda linear: CudaFp8Linear(Fp8Linear.from_linear(linear)),
    "int4 in groups of 64": lambda linear: CudaInt4Linear(Int4Linear.from_linear(linear, 64)),
    "int4 in groups of 128": lambda linear: CudaInt4Linear(Int4Linear.from_linear(linear, 128)),
}


def in_float32(layer, x):
    weight = layer.dequantize(torch.float32) if hasattr(layer, "dequantize") else layer.weight.float()
    return F.linear(x.float(), weight, None if layer.bias is None else layer.bias.float())


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU of compute capability 9.0")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("gates", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_the_kernels_give_what_products_and_norms_give(kind, gates, rows):
    torch.manual_seed(0)
    shapes = (4096, 1024, 1536, True), (4096, 4096, 6144, False), (3584, 18944, 512, False), (8192, 512, 1024, True)
    for hidden, inputs, outputs, has_bias in shapes:
        before, after = (
            LAYERS[kind](nn.Linear(*sizes, bias=has_bias, dtype=torch.bfloat16, device="cuda").requires_grad_(False))
            for sizes in ((inputs, hidden), (hidden, outputs * (2 if gates else 1)))
        )
        gain = torch.rand(hidden, device="cuda").bfloat16() + 0.5
        norm = NormParameters(gain=gain, epsilon=1e-5)
        x = torch.randn(rows, inputs, device="cuda").bfloat16()
        lengths = torch.linspace(0.5, 20, rows, device="cuda")
        stream = (torch.randn(rows, hidden, device="cuda") * lengths[:, None]).bfloat16()
        with torch.inference_mode():
            whole = (stream.float() + in_float32(before, x)).bfloat16()
            normal = F.rms_norm(whole.float(), (hidden,), gain.float(), 1e-5)
            expected = in_float32(after, normal)
            if gates:
                gate, up = expected.chunk(2, dim=-1)
                expected = F.silu(gate) * up
            joined = joined_norm(kernel_linear(before), norm, kernel_linear(after, gates=gates))
            found = joined.add(x, stream)
            y = found.multiply().float()
        y = y.sum(0) if y.dim() == 3 else y
        assert (stream.float() - whole.float()).norm() <= 1e-3 * whole.float().norm()
        assert (y - expected).norm() <= 0.006 * expected.norm()
        for row in range(rows):  # each has its own factor
            assert (y[row] - expected[row]).norm() <= 0.015 * expected[row].norm()


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class PlainProduct:
    """The twin of a product that has a part of a norm."""

    division = Division(STREAM_BLOCKS[INT8], STREAM_PARTS)

    def __init__(self, linear, calls):
        self.linear, self._calls = linear, calls

    def __call__(self, x, *, factors=None, stream=None):
        self._calls.append("scaled" if stream is None else "added")
        y = F.linear(x, self.linear.weight)
        if factors is not None:
            y = y * (factors.squares_TG.sum(1, keepdim=True) / x.shape[1] + factors.epsilon).rsqrt()
        y = y if self.linear.bias is None else y + self.linear.bias
        if stream is not None:
            stream.x_TN.add_(y)
            stream.y_TN.copy_(stream.x_TN * stream.gains_N)
            stream.squares_TG.zero_()[:, -1] = stream.x_TN.square().sum(1)
            return stream.y_TN
        if self.linear.gates:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return y


NETWORKS = {  # and how many norms of its two layers are within products
    "Llama": ({}, 3),
    "Qwen 2": ({"qkv_bias": True, "tied_embeddings": True}, 3),
    "Qwen 3": ({"qk_norm": True}, 3),
    "Phi 3": ({"rotary_size": 8}, 3),
    "scaled residuals": ({"residual_scale": 0.5}, 0),
    "Mixtral": ({"num_experts": 4, "expert_size": 48}, 0),
    "Gemma 1": ({"norm_offset": 1.0, "activation": "gelu_tanh"}, 0),
    "Exaone 4": ({"norm_places": "after", "qk_norm": True, "num_kv_heads": 1}, 0),
    "Command R": ({"norm": "layer", "is_parallel": True}, 0),
}


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)",
)
class TestLayers:
    @pytest.fixture
    def calls(self, monkeypatch):
        found = []

        def product_of(x, linear, *, streams):
            return PlainProduct(linear, found) if len(x) <= STREAM_ROWS else None

        monkeypatch.setattr(stream_products, "product_of", product_of)
        if DEVICE.type == "cpu":
            monkeypatch.setattr("flambeau.llm.backends.cuda.attention.PROGRAMS", 4)
        return found

    @pytest.mark.parametrize("network", NETWORKS)
    def test_steps_give_the_twins_logits(self, network, calls):
        options, num_joined = NETWORKS[network]
        self._compare(random_model(head_size=16, num_layers=2, **options).to(DEVICE), 3)
        assert calls == ["added", "scaled"] * num_joined

    def test_more_rows_have_norms_of_their_own(self, calls):
        self._compare(random_model(head_size=16, num_layers=2).to(DEVICE), STREAM_ROWS + 1)
        assert not calls

    def test_states_for_a_head_have_what_was_added(self, calls):
        self._compare(random_model(head_size=16, num_layers=2).to(DEVICE), 3, layers=(1, 2))
        assert calls

    def _compare(self, model, num_sequences, layers=()):
        inputs = step_inputs({number: (3 + number, [5 + number]) for number in range(num_sequences)}, query_len=1)
        caches = [room(model, num_sequences, device=DEVICE) for _ in range(2)]
        for cache in caches:
            torch.manual_seed(5)
            for tensor in (*cache.keys, *cache.values):
                tensor.normal_()
        states = [HiddenStates(layers) if layers else None for _ in caches]
        expected = EagerBackend(model, caches[0], states=states[0]).decode(inputs)
        with torch.inference_mode():
            found = CudaNetwork(model, caches[1], states[1]).run(inputs.to(DEVICE))
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
        if layers:
            torch.testing.assert_close(states[1].take(), states[0].take(), atol=2e-4, rtol=1e-4)
