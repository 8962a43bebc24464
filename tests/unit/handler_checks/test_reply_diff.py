"""Replies are compared by value."""

from __future__ import annotations

import io
import json

import pytest
import torch

from flambeau.handler_checks.reply_diff import first_difference


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 0.41}, {"a": 0.410001}),
        ([1e-9], [0.0]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (3, 3.0),
        ([float("nan")], [float("nan")]),
        ([float("inf")], [float("inf")]),
        ("text", "text"),
        ([True, None], [True, None]),
    ],
)
def test_equal_within_tolerance(one, other):
    assert first_difference(as_json(one), as_json(other)) is None


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        ({"scores": {"cat": 0.41}}, {"scores": {"cat": 0.73}}, "[2].scores.cat: 0.41 vs 0.73"),
        ([1, 2, 3], [1, 5, 6], "[2][1]: 2 vs 5"),
        ([1], [1, 2], "[2]: 1 items vs 2"),
        ({"a": 1}, {}, "[2].a: present vs missing"),
        ({}, {"a": 1}, "[2].a: missing vs present"),
        (True, 1, "[2]: True vs 1"),
        (None, 0, "[2]: None vs 0"),
        ([0.5], [float("nan")], "[2][0]: 0.5 vs nan"),
        ("cat", "dog", "[2]: 'cat' vs 'dog'"),
        ({"a": 1}, [1], "[2]: {'a': 1} vs [1]"),
        (1.0, 1.001, "[2]: 1.0 vs 1.001"),
    ],
)
def test_first_difference_is_found(one, other, where):
    assert first_difference(as_json(one), as_json(other), "[2]") == where


def test_text_and_bytes_are_compared_as_they_are():
    assert first_difference(b"cat", b"dog") == "it: 'cat' vs 'dog'"
    assert first_difference(b"\xff\x00", b"\xff\x01") == "it: b'\\xff\\x00' vs b'\\xff\\x01'"
    assert first_difference(b"[" * 100_000, b"[" * 100_000) is None


def saved(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def test_tensors_are_compared_by_their_values():
    whole = torch.arange(6.0).reshape(2, 3)
    assert saved(whole[1]) != saved(whole[1].clone())
    assert first_difference(saved(whole[1]), saved(whole[1].clone())) is None
    assert first_difference(saved(whole[1]), saved(whole[0]), "[0]") == "[0][0]: 3.0 vs 0.0"
