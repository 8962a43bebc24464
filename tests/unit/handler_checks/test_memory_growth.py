"""A leak is told from noise and from warm-up."""

from __future__ import annotations

import random

import pytest

from flambeau.handler_checks.memory_growth import MemoryReadings, calls_per_step, find_growth, rises_steadily, slope

FLAT = [1000] * 11
MB = 1_000_000


def readings(blocks=FLAT, objects=FLAT, resident=FLAT, calls=20):
    return MemoryReadings(calls, blocks, objects, resident)


def test_constant_memory_is_no_leak():
    assert not find_growth(readings()).is_leak


def test_object_kept_per_call_is_a_leak():
    growth = find_growth(readings(blocks=[1000 + 20 * i for i in range(11)]))
    assert growth.blocks == pytest.approx(1.0)
    assert growth.objects == 0


def test_resident_memory_outside_of_python_is_a_leak():
    noise = random.Random(1)
    resident = [100 * MB + 200_000 * i + noise.randrange(20_000) for i in range(11)]
    assert find_growth(readings(resident=resident)).resident_bytes == pytest.approx(10_000, rel=0.1)


@pytest.mark.parametrize(
    "values",
    [
        [0, 50, 80, 95, 100, 103, 104, 104, 105, 105, 105],  # a cache that fills
        [0, 0, 0, 0, 0, 500, 500, 500, 500, 500, 500],  # one jump
        [0, 9, -3, 12, 2, 8, -5, 3, 11, 0, 6],  # up and down
        [500, 450, 400, 350, 300, 250, 200, 150, 100, 50, 0],
    ],
)
def test_warming_up_and_noise_are_no_leak(values):
    assert not find_growth(readings(blocks=[1000 + value for value in values])).is_leak


def test_growth_below_the_noise_of_the_system_is_no_leak():
    assert not find_growth(readings(resident=[100 * MB + 4096 * i for i in range(11)])).is_leak
    assert not find_growth(readings(blocks=[1000 + i for i in range(11)])).is_leak


def test_few_calls_need_more_evidence_per_call():
    assert not find_growth(readings(calls=1, resident=[100 * MB + 10_000 * i for i in range(11)])).is_leak
    assert find_growth(readings(calls=1, resident=[100 * MB + MB * i for i in range(11)])).is_leak


def test_one_jump_does_not_move_the_slope():
    assert slope([0, 1, 2, 3, 400, 401, 402]) < 150
    assert slope([0, 2, 4, 6]) == 2
    assert rises_steadily([0, 2, 4, 6])


@pytest.mark.parametrize(("call_s", "count"), [(0.0001, 20), (0.1, 3), (1.0, 1), (2.0, 0)])
def test_slow_calls_are_made_less_often(call_s, count):
    assert calls_per_step(call_s) == count
