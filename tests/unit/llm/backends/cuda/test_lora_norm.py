"""Norms with adapters before and after them give what their plain twins give: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton here")

from flambeau.llm.backends.cuda import lora_norm
from flambeau.llm.backends.cuda.lora_kernel import shrink
from flambeau.llm.backends.cuda.lora_norm import Unexpanded, can_expand, can_shrink, normalize, ranks_of_program
from flambeau.llm.backends.cuda.lora_slots import LayerShape, LayerSlots, plain_lora
from flambeau.llm.backends.cuda.norm import NormParameters

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_kernels = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)",
    ),
]
ROWS, HIDDEN, INPUTS = 3, 80, 48
PLACES = torch.tensor([2, 0, 1], device=DEVICE)
BEFORE = LayerShape(INPUTS, HIDDEN)
AFTER = {1: LayerShape(HIDDEN, 64), 2: LayerShape(HIDDEN, 128, (0, 64)), 3: LayerShape(HIDDEN, 128, (0, 64, 96))}


def random(*shape, dtype=torch.float32):
    return torch.randn(shape).to(DEVICE, dtype)


def random_slots(shape: LayerShape, rank: int) -> LayerSlots:
    return LayerSlots(shape, random(2, len(shape.starts) * rank, shape.inputs), random(2, rank, shape.outputs))


def norm_of(**options):
    return NormParameters(**{"gain": random(HIDDEN), "epsilon": 1e-5, **options})


NORMS = {  # the norm, the rank, parts of the sum (0: not in parts), whether inputs are given, segments after it
    "RMS": (lambda: norm_of(), 16, 3, True, 3),
    "scaled": (lambda: norm_of(residual_scale=0.3), 32, 0, False, 2),
    "layer norm": (lambda: norm_of(bias=random(HIDDEN)), 128, 2, True, 1),
    "after": (lambda: norm_of(after=(random(HIDDEN), None), residual_scale=0.5), 64, 3, False, 2),
    "layer norm after": (lambda: norm_of(bias=random(HIDDEN), after=(random(HIDDEN),) * 2), 16, 2, True, 3),
    "only after": (lambda: norm_of(gain=None, after=(random(HIDDEN), None)), 16, 0, True, 2),
    "replaces": (lambda: norm_of(bias=random(HIDDEN), replaces=True), 16, 2, False, 3),
    "wide residual": (lambda: norm_of(dtype=torch.bfloat16), 16, 2, False, 3),
    "none": (lambda: norm_of(gain=None), 16, 2, True, 1),
}


@pytest.mark.parametrize("case", NORMS)
class TestNorm:
    pytestmark = needs_kernels

    def test_norms_expand_and_shrink(self, case, monkeypatch):
        torch.manual_seed(0)
        make, rank, parts, has_inputs, segments = NORMS[case]
        norm, before, after = make(), random_slots(BEFORE, rank), random_slots(AFTER[segments], rank)
        x, given = random(ROWS, HIDDEN), random(ROWS, INPUTS) * 0.1
        y = random(parts, ROWS, HIDDEN) if parts else random(ROWS, HIDDEN)
        inner = None if has_inputs else shrink(given, PLACES, before)
        if inner is not None:  # in several parts, with rubbish for the row without an adapter
            inner = torch.stack((inner[0] - 1, torch.full_like(inner[0], 0.25), torch.full_like(inner[0], 0.75)))
            inner[:, 1] = torch.nan
        sums = Unexpanded(y=y, x_TI=given, inner_PTX=inner, slots=before, places_T=PLACES)
        whole = y.sum(0) if parts else y
        monkeypatch.setattr(lora_norm, "NUM_PROGRAMS", 16)  # two of a row: each has several pieces of ranks
        monkeypatch.setattr(lora_norm, "expand", None)
        monkeypatch.setattr(lora_norm, "shrink", None)
        for added, next_slots in ((sums, after), (sums, None), (whole, after), (None, after)):
            expected, without = x.clone(), x.clone()
            total = plain_lora(whole, given, PLACES, before) if added is sums else added
            y_expected = norm(expected, total)
            found = normalize(norm, without, added, next_slots, PLACES)
            torch.testing.assert_close(found.x_TE, expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found.y_TE, y_expected, atol=1e-4, rtol=1e-4)
            assert (found.x_TE is without) == (next_slots is None or (added is None and not norm.replaces))
            if next_slots is None:
                assert found.inner_PTX is None
                continue
            for row in (0, 2):
                expected_X = next_slots.a_LXI[PLACES[row] - 1] @ y_expected[row].float()
                torch.testing.assert_close(found.inner_PTX[0, row], expected_X, atol=5e-3, rtol=1e-3)


def slots_like(inputs, outputs, rank, segments=1):
    starts = tuple(outputs // segments * number for number in range(segments))
    with torch.device("meta"):
        matrices = torch.empty(8, segments * rank, inputs), torch.empty(8, rank, outputs)
    return LayerSlots(LayerShape(inputs, outputs, starts), *(matrix.bfloat16() for matrix in matrices))


def test_norms_read_only_small_matrices():
    small, large = slots_like(2048, 2048, 16), slots_like(2048, 2048, 128)
    assert can_expand(small, 8, shrinks=True)
    assert not can_expand(small, 65, shrinks=True)
    assert not can_expand(large, 8, shrinks=False)
    down = slots_like(8192, 2048, 32)
    assert can_expand(down, 8, shrinks=False)
    assert not can_expand(down, 8, shrinks=True)  # a program would hold too many inputs
    qkv = slots_like(2048, 3072, 16, segments=3)
    assert [ranks_of_program(qkv, rows) for rows in (1, 5, 8, 9, 33, 64)] == [4, 4, 4, 8, 24, 24]
    assert can_shrink(qkv, 64)
    assert not can_shrink(slots_like(2048, 3072, 128, segments=3), 64)
    assert not can_shrink(slots_like(8192, 3072, 16, segments=3), 1)
    other = replace(small, b_LRO=small.b_LRO.float(), a_LXI=small.a_LXI.float())
    assert can_expand(other, 8, shrinks=True)
