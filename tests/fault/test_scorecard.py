"""The quick subset of the scorecard: the promises under smaller attacks, each in a process of its own."""

from __future__ import annotations

import uuid

import pytest
from scorecard.case import Scale
from scorecard.cases import CASES
from scorecard.probes import MARK
from scorecard.report import lines_of
from scorecard.runner import run_apart

QUICK = [case for case in CASES if case.is_quick]


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_promise_is_kept(case, monkeypatch):
    monkeypatch.setenv(MARK, uuid.uuid4().hex)
    outcome = run_apart(case, Scale(is_quick=True))
    assert outcome.is_kept, "\n".join(lines_of(outcome))
