"""The budget of unread replies: who is paused, who is cut, and who is left alone."""

from __future__ import annotations

from flambeau.serving.reply_budget import (
    HELD_UP_S,
    MAX_HELD_BYTES,
    STEADY_BYTES,
    ReplyBudget,
    hold_up_s,
    resume_below_bytes,
)

MB = 1 << 20


def test_a_reply_is_paused_earlier_the_more_is_held():
    budget = ReplyBudget[str](total_bytes=64 * MB)
    assert budget.pause_above_bytes == 4 * MB == MAX_HELD_BYTES
    budget.hold("a", 32 * MB, 0.0)
    assert budget.pause_above_bytes == 2 * MB
    budget.hold("b", 40 * MB, 0.0)
    assert budget.pause_above_bytes == 0


def test_any_number_of_greedy_replies_leaves_room_for_one_more():
    budget = ReplyBudget[int](total_bytes=64 * MB)
    for i in range(1000):
        budget.hold(i, budget.pause_above_bytes, 0.0)
    assert not budget.is_exceeded
    assert budget.pause_above_bytes < 64 * 1024  # a newcomer may still hold what the system's own buffer holds


def test_what_is_read_or_released_is_free_again():
    budget = ReplyBudget[str](total_bytes=64 * MB)
    budget.hold("a", 10 * MB, 0.0)
    budget.hold("a", 4 * MB, 1.0)
    assert budget.held_bytes == 4 * MB
    budget.release("a")
    budget.release("a")
    assert budget.held_bytes == 0


def test_within_the_limit_no_client_is_cut():
    budget = ReplyBudget[str](total_bytes=10 * MB)
    budget.hold("a", 10 * MB, 0.0)
    assert budget.to_cut(100.0) == []


def test_who_holds_most_for_longest_is_cut_first():
    budget = ReplyBudget[str](total_bytes=10 * MB)
    budget.hold("old", 4 * MB, 0.0)
    budget.hold("older but small", 1 * MB, -100.0)
    budget.hold("new", 6 * MB, 9.0)
    assert budget.is_exceeded
    assert budget.to_cut(10.0) == ["old"]


def test_as_many_are_cut_as_it_takes():
    budget = ReplyBudget[int](total_bytes=10 * MB)
    for i in range(6):
        budget.hold(i, 4 * MB, float(i))
    assert budget.to_cut(10.0) == [0, 1, 2, 3]


def test_small_clients_are_never_cut():
    budget = ReplyBudget[str](total_bytes=10 * MB)
    for i in range(100):
        budget.hold(f"small {i}", 10_000, -1000.0)
    budget.hold("greedy", 10 * MB, 9.9)
    assert budget.to_cut(10.0) == ["greedy"]


def test_the_limit_has_room_for_several_of_the_largest_replies():
    budget = ReplyBudget[str](100 * MB, total_bytes=10 * MB)
    budget.hold("a", 400 * MB, 0.0)
    assert not budget.is_exceeded


def test_a_client_that_reads_nothing_in_time_is_stalled():
    budget = ReplyBudget[str]()
    budget.hold("a", 2 * MB, 0.0)
    assert budget.stalled(59.0, 60.0) == []
    assert budget.stalled(61.0, 60.0) == ["a"]


def test_a_slow_but_steady_client_is_not_stalled():
    budget = ReplyBudget[str]()
    budget.hold("a", 4 * MB, 0.0)
    for minute in range(1, 50):  # a megabyte is read and another comes
        now = minute * 50.0
        budget.hold("a", 4 * MB, now, added_bytes=STEADY_BYTES)
        assert budget.stalled(now, 60.0) == []


def test_drops_now_and_then_are_not_steady():
    budget = ReplyBudget[str]()
    budget.hold("a", 4 * MB, 0.0)
    for second in range(1, 62):
        budget.hold("a", 4 * MB - second, float(second))
    assert budget.stalled(61.0, 60.0) == ["a"]


def test_a_paused_reply_goes_on_before_everything_is_read():
    assert 0 < resume_below_bytes(4 * MB) < 4 * MB


def test_large_parts_have_more_time_to_be_read():
    assert hold_up_s(10) == HELD_UP_S
    assert hold_up_s(3 * STEADY_BYTES) == 3 * HELD_UP_S
