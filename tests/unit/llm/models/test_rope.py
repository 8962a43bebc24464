"""Rotary positions: what they keep, and how they are stretched."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from flambeau.llm.models import rope
from flambeau.llm.models.architecture import RopeScaling
from flambeau.llm.models.rope import Rotation, inverse_wavelengths, rotate
from support.tiny_models import ARCH

WIDE = replace(ARCH, head_size=64, rope_theta=500000.0)
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_length=8192)
YARN = RopeScaling(kind="yarn", factor=4.0, original_length=4096)


def test_only_the_distance_between_two_tokens_matters():
    rotation = Rotation(ARCH)
    q, k = torch.randn(2, 1, 1, ARCH.head_size)

    def product(query_at: int, key_at: int) -> float:
        turned = [rotate(x, *rotation.angles(torch.tensor([at]))) for x, at in ((q, query_at), (k, key_at))]
        return float((turned[0] * turned[1]).sum())

    assert product(107, 100) == pytest.approx(product(7, 0), abs=1e-4)
    assert product(107, 100) != pytest.approx(product(108, 100), abs=1e-3)


def test_the_tables_stay_exact_when_the_network_becomes_narrow():
    rotation = Rotation(ARCH)
    exact = rotation.cos.clone()
    assert torch.equal(rotation.to(torch.bfloat16).half().cos, exact)


def test_the_tables_are_there_once_a_network_without_memory_gets_some():
    with torch.device("meta"):
        rotation = Rotation(ARCH)
    assert rotation.cos.is_meta
    assert torch.equal(rotation.to_empty(device="cpu").sin, Rotation(ARCH).sin)


def test_rotation_keeps_the_type_of_what_it_turns():
    x = torch.randn(3, 2, ARCH.head_size, dtype=torch.bfloat16)
    assert rotate(x, *Rotation(ARCH).angles(torch.arange(3))).dtype == torch.bfloat16


def test_linear_scaling_slows_all_frequencies():
    plain, _ = inverse_wavelengths(WIDE)
    slow, factor = inverse_wavelengths(replace(WIDE, rope_scaling=RopeScaling(kind="linear", factor=4.0)))
    torch.testing.assert_close(slow, plain / 4)
    assert factor == 1.0


@pytest.mark.parametrize("scaling", [LLAMA3, YARN])
def test_quick_frequencies_are_kept_slow_ones_stretched_and_those_between_blended(scaling):
    plain, _ = inverse_wavelengths(WIDE)
    stretched, _ = inverse_wavelengths(replace(WIDE, rope_scaling=scaling))
    ratio = (plain / stretched).tolist()
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(scaling.factor)
    assert ratio == sorted(ratio)
    assert any(1.1 < r < scaling.factor - 0.1 for r in ratio)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.1 * math.log(4.0) + 1.0),
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 2.0, "mscale_all_dimensions": 1.0}, (0.2 * math.log(4.0) + 1.0) / (0.1 * math.log(4.0) + 1.0)),
        ({"mscale": 2.0}, 0.1 * math.log(4.0) + 1.0),
    ],
)
def test_yarn_sharpens_attention(options, expected):
    assert inverse_wavelengths(replace(WIDE, rope_scaling=replace(YARN, **options)))[1] == pytest.approx(expected)


def test_angles_of_very_long_sequences_are_computed_without_tables(monkeypatch):
    scaled = replace(WIDE, rope_scaling=YARN, max_length=4096)
    positions = torch.tensor([0, 5, 4095])
    expected = Rotation(scaled)(positions)
    monkeypatch.setattr(rope, "MAX_TABLE_LENGTH", 1024)
    rotation = Rotation(scaled)
    assert not rotation.cos.numel()
    torch.testing.assert_close(rotation(positions).ordinary, expected.ordinary, atol=1e-6, rtol=0.0)
