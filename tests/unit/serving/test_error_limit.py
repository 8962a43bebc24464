"""When a version has failed so often that it gets no more requests."""

from __future__ import annotations

from collections import Counter

import pytest

from flambeau.serving.error_limit import MIN_ANSWERS, WINDOW, ErrorLimit


@pytest.mark.parametrize(
    ("percent", "good", "failed", "exceeds"),
    [
        (5, 0, MIN_ANSWERS - 1, False),  # too few
        (5, 0, MIN_ANSWERS, True),
        (5, 19, 1, False),  # just as many as allowed
        (5, 18, 2, True),
        (0, 19, 1, True),
        (0, 100, 0, False),
    ],
)
def test_a_limit_is_exceeded_by_the_share_of_failed_answers(percent, good, failed, exceeds):
    answers = Counter({200: 1000, 500: 1000})  # before it was set
    limit = ErrorLimit(percent, answers)
    answers.update({200: good // 2, 400: good - good // 2, 500: failed // 2, 503: failed - failed // 2})
    assert bool(limit.excess()) is exceeds


def test_only_the_last_answers_count():
    answers: Counter[int] = Counter()
    limit = ErrorLimit(20, answers)
    for _ in range(100 * WINDOW):
        answers[200] += 1
        assert not limit.excess()
    while not (reason := limit.excess()):
        answers[502] += 1
    assert answers[502] <= 2 * WINDOW * 0.2 + 11
    assert reason.endswith("answers were errors of the server, more than 20 %")


def test_answers_that_break_off_have_failed():
    answers, broken = Counter({200: 1000}), [7]
    limit = ErrorLimit(20, answers, lambda: broken[0])
    answers[200] += MIN_ANSWERS
    assert not limit.excess()
    broken[0] += MIN_ANSWERS // 5 + 1
    assert limit.excess().startswith(f"{MIN_ANSWERS // 5 + 1} of its last {MIN_ANSWERS} answers")
