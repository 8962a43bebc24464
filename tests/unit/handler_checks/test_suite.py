"""Outcomes of checks become verdicts."""

from __future__ import annotations

import pytest

from flambeau.errors import BadRequest, PredictionException
from flambeau.handler_checks.guarded_call import CallOutcome, CallTimeout, ProcessExit
from flambeau.handler_checks.memory_growth import GrowthReport, MemoryGrowth
from flambeau.handler_checks.suite import rate_growth, rate_malformed


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
        (CallOutcome(error=SystemExit(3)), "problem", "sys.exit(3) would exit the worker"),
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
