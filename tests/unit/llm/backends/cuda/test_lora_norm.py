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
ROWS, HIDDEN, INPUTS, SLOTS = 3, 80, 48, 4
PLACES = torch.tensor([2, 0, 1], device=DEVICE)
BEFORE = LayerShape(INPUTS, HIDDEN)
AFTER = {1: LayerShape(HIDDEN, 64), 2: LayerShape(HIDDEN, 128, (0, 64)), 3: LayerShape(HIDDEN, 128, (0, 64, 96))}


def random(*shape, dtype=torch.float32):
    return torch.randn(shape).to(DEVICE, dtype)


def random_slots(shape: LayerShape, rank: int) -> LayerSlots:
    return LayerSlots(shape, random(SLOTS, len(shape.starts) * rank, shape.inputs), random(SLOTS, rank, shape.outputs))


def norm_of(**options):
    return NormParameters(**{"gain": random(HIDDEN), "epsilon": 1e-5, **options})


NORMS = {  # the norm, the rank, parts of the sum (0: not in parts), whether inner sums have all slots, segments after
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
        make, rank, parts, all_slots, segments = NORMS[case]
        norm, before, after = make(), random_slots(BEFORE, rank), random_slots(AFTER[segments], rank)
        x, given = random(ROWS, HIDDEN), random(ROWS, INPUTS) * 0.1
        y = random(parts, ROWS, HIDDEN) if parts else random(ROWS, HIDDEN)
        inner = shrink(given, PLACES, before)[0]
        inner[1] = torch.nan  # of the row without an adapter
        if all_slots:  # each row's own is among them
            own, inner = inner, torch.full((ROWS, SLOTS, rank), torch.nan, device=DEVICE)
            inner[torch.arange(ROWS), PLACES - 1] = own
            inner = inner.flatten(1)
        inner = torch.stack((inner - 1, torch.full_like(inner, 0.25), torch.full_like(inner, 0.75)))
        sums = Unexpanded(y=y, inner=inner, slots=before, places_T=PLACES)
        assert sums.has_all_slots == all_slots
        whole = y.sum(0) if parts else y
        monkeypatch.setattr(lora_norm, "NUM_PROGRAMS", 16)  # two of a row: each has several pieces of ranks
        monkeypatch.setattr(lora_norm, "expand", None)
        monkeypatch.setattr(lora_norm, "shrink", None)
        for added, next_slots in ((sums, after), (sums, None), (whole, after), (None, after)):
            expected, without = x.clone(), x.clone()
            total = plain_lora(whole, given, PLACES, before) if added is sums else added
            y_expected = norm(expected, total)
            spreads = all_slots and next_slots is not None
            found = normalize(norm, without, added, next_slots, PLACES, spreads=spreads)
            torch.testing.assert_close(found.x_TE, expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found.y_TE, y_expected, atol=1e-4, rtol=1e-4)
            assert (found.x_TE is without) == (next_slots is None or (added is None and not norm.replaces))
            if next_slots is None:
                assert found.inner is None
                continue
            found_TLX = by_slots(found.inner, segments) if spreads else None
            for row in range(ROWS):
                place = int(PLACES[row])
                expected_X = next_slots.a_LXI[place - 1] @ y_expected[row].float()
                if found_TLX is None:
                    if place:
                        torch.testing.assert_close(found.inner[0, row], expected_X, atol=5e-3, rtol=1e-3)
                    continue
                expected_LX = torch.zeros_like(found_TLX[row])
                if place:
                    expected_LX[place - 1] = expected_X
                torch.testing.assert_close(found_TLX[row], expected_LX, atol=5e-3, rtol=1e-3)


@pytest.mark.parametrize("all_slots", [False, True])
class TestUnexpanded:
    pytestmark = needs_kernels

    def test_adapters_are_added_apart(self, all_slots):
        torch.manual_seed(0)
        layer, given, y = random_slots(BEFORE, 16), random(ROWS, INPUTS), random(2, ROWS, HIDDEN)
        inner = shrink(given, PLACES, layer)
        if all_slots:
            inner = torch.einsum("ti,lxi->tlx", given, layer.a_LXI).flatten(1)[None]
        expected = plain_lora(y.sum(0), given, PLACES, layer)
        found = Unexpanded(y=y, inner=inner, slots=layer, places_T=PLACES).expanded()
        torch.testing.assert_close(found.sum(0), expected, atol=1e-3, rtol=1e-3)


def by_slots(inner, segments):
    """[T, L, X] of sums whose segments have the ranks of all slots."""
    return inner.float().view(ROWS, segments, SLOTS, -1).transpose(1, 2).flatten(2)


def slots_like(inputs, outputs, rank, segments=1):
    starts = tuple(outputs // segments * number for number in range(segments))
    with torch.device("meta"):
        matrices = torch.empty(8, segments * rank, inputs), torch.empty(8, rank, outputs)
    return LayerSlots(LayerShape(inputs, outputs, starts), *(matrix.bfloat16() for matrix in matrices))


def test_norms_read_only_small_matrices():
    small, large = slots_like(2048, 2048, 16), slots_like(2048, 2048, 128)
    assert can_expand(small, 8)
    assert not can_expand(small, 65)
    assert not can_expand(large, 8)
    assert can_expand(slots_like(8192, 2048, 32), 8)
    qkv = slots_like(2048, 3072, 16, segments=3)
    assert [ranks_of_program(qkv, rows) for rows in (1, 5, 8, 9, 33, 64)] == [4, 4, 4, 8, 24, 24]
    assert can_shrink(qkv, 64)
    assert not can_shrink(slots_like(2048, 3072, 128, segments=3), 64)
    assert not can_shrink(slots_like(8192, 3072, 16, segments=3), 1)
    other = replace(small, b_LRO=small.b_LRO.float(), a_LXI=small.a_LXI.float())
    assert can_expand(other, 8)
