"""Outcomes of checks become verdicts."""

from __future__ import annotations

import io
import json

import pytest
import torch

from flambeau.errors import BadRequest, PredictionException
from flambeau.handler_checks.guarded_call import CallOutcome, CallTimeout, ProcessExit
from flambeau.handler_checks.memory_growth import GrowthReport, MemoryGrowth
from flambeau.handler_checks.suite import first_difference, rate_growth, rate_malformed


@pytest.mark.parametrize(
    ("outcome", "level", "words"),
    [
        (CallOutcome(replies=[b"x"]), "ok", "answered"),
        (CallOutcome(replies=[b"x"], statuses=[422]), "ok", "answered"),
        (CallOutcome(replies=[b"x"], statuses=[500]), "note", "status 500"),
        (CallOutcome(error=PredictionException("no x", 422)), "ok", "rejected with 422: no x"),
        (CallOutcome(error=BadRequest("a form")), "ok", "rejected with 400"),
        (CallOutcome(error=PredictionException("no x")), "note", "answers 500"),
        (CallOutcome(error=KeyError("x")), "note", "answers 503 (KeyError: 'x'); raise PredictionException(…, 400)"),
        (CallOutcome(error=MemoryError()), "note", "answers 507"),
        (CallOutcome(error=CallTimeout("no answer within 1 s")), "problem", "no answer within 1 s"),
        (CallOutcome(error=SystemExit(3)), "problem", "the handler called sys.exit(3). It ends the worker"),
        (CallOutcome(error=ProcessExit("os._exit(1)")), "problem", "os._exit(1) would exit the worker"),
    ],
)
def test_answers_to_malformed_requests_are_rated(outcome, level, words):
    rated, text = rate_malformed(outcome)
    assert rated == level
    assert words in text


def test_leak_names_the_types_that_grow():
    verdict = rate_growth(GrowthReport(MemoryGrowth(2.0, 2.0, 0), 200, True, ["list", "dict"]))
    assert verdict.level == "problem"
    assert "mostly list, dict" in verdict.text


def test_system_that_does_not_report_memory_is_noted():
    assert rate_growth(GrowthReport(MemoryGrowth(0, 0, 0), 200, False, [])).level == "note"
    assert rate_growth(GrowthReport(MemoryGrowth(0, 0, 0), 200, True, [])).level == "ok"


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
