"""Steps for the compiler to try out, and what it gives back."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from flambeau.llm.backends import inductor
from flambeau.llm.backends.cpu.packed_experts import PackedStack, pack_experts
from flambeau.llm.backends.cpu.packed_linear import pack_layers
from flambeau.llm.backends.eager import EagerBackend, PagedAttention
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.quantizer import quantize
from flambeau.llm.quantize.row_scaled import Int8Linear
from support.checkpoints import config_of
from support.cpu_kernels import need_cpu_kernels
from support.llm_steps import random_model, room, step_inputs


def test_dummy_inputs_touch_block_0_only():
    model = random_model()
    cache = room(model, 2)
    before = [tensor[1:].clone() for tensor in (*cache.keys, *cache.values)]
    EagerBackend(model, cache).decode(inductor.dummy_inputs(3, 2, 2, torch.device("cpu")))
    after = [tensor[1:] for tensor in (*cache.keys, *cache.values)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_logits_are_contiguous_also_where_the_compiler_pads_rows(monkeypatch):
    def padding_compiler(step, **options):
        def compiled(*tensors):
            logits_TV, found = step(*tensors)
            return functional.pad(logits_TV, (0, 3), value=99.0)[:, :-3], found

        return compiled

    monkeypatch.setattr(torch, "compile", padding_compiler)
    model = random_model()
    inputs = step_inputs({0: (3, [5]), 1: (7, [8])}, query_len=1)
    torch.manual_seed(0)
    run = inductor.compile_step(model, room(model, 2), 1, PagedAttention, inputs)
    torch.manual_seed(0)
    expected = EagerBackend(model, room(model, 2)).decode(inputs)
    logits_TV = run(inputs)
    assert logits_TV.is_contiguous()  # kernels that choose tokens know no strides
    torch.testing.assert_close(logits_TV, expected)


@pytest.mark.timeout(300)  # the kernels may have to be built
def test_layers_and_experts_in_the_order_of_the_kernels_are_traced(monkeypatch):
    """In a network that the kernels do not compute as a whole."""
    need_cpu_kernels()
    trace = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **options: trace(step, fullgraph=True, backend="eager"))
    sizes = {"head_size": 16, "intermediate_size": 64, "num_experts": 6, "expert_size": 32, "qkv_bias": True}
    model = quantize(random_model(**sizes), "int8", group_size=32)
    pack_layers(model, (Int8Linear,))
    pack_experts(model, packs_float32=True)
    assert isinstance(model.model.layers[0].mlp.experts.down_proj, PackedStack)
    for number in (1, 2, 5):
        inputs = step_inputs({i: (3 + i, [5 + i]) for i in range(number)}, query_len=1)
        caches = [room(model, 5, rubbish=1.0) for _ in range(2)]
        for ours, theirs in zip(*(cache.tensors for cache in caches), strict=True):
            ours.copy_(theirs)
        run = inductor.compile_step(model, caches[0], 1, PagedAttention, inputs)
        for ours, theirs in zip(*(cache.tensors for cache in caches), strict=True):
            ours.copy_(theirs)
        torch.testing.assert_close(run(inputs), EagerBackend(model, caches[1]).decode(inputs), atol=1e-5, rtol=1e-5)


def test_steps_with_thresholds_of_gates_are_traced(monkeypatch):
    """Gemma 3n: a part of Python's library computes them, which the compiler does not know."""
    trace = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **options: trace(step, fullgraph=True, backend="eager"))
    monkeypatch.setattr(inductor, "mark_dynamic", lambda tensor: None)
    model = Transformer(from_hugging_face(config_of("gemma-3n"))).requires_grad_(False)
    assert any(model.arch.sparsity)
    inputs = step_inputs({0: (3, [5])}, query_len=1)
    torch.manual_seed(0)
    run = inductor.compile_step(model, room(model, 1), 1, PagedAttention, inputs)
    torch.manual_seed(0)
    expected = EagerBackend(model, room(model, 1)).decode(inputs)
    torch.testing.assert_close(run(inputs), expected)
