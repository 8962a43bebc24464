"""Speculation is used where it pays, and tried again where it did not."""

from flambeau.llm.speculation.worth import TRIAL, Worth


def run(worth: Worth, steps: int, *, gain: float, batch_size: int = 1, slow_every: int = 0) -> list[int]:
    """Steps of one second, in which speculation makes so many tokens per second and sequence."""
    chosen = []
    for step in range(steps):
        ahead = worth.num_ahead(batch_size)
        chosen.append(ahead)
        is_slow = slow_every and step % slow_every == 0
        tokens = 3 if ahead else 1
        seconds = (3 / gain if ahead else 1.0) * (50.0 if is_slow else 1.0)
        worth.note(batch_size, ahead, seconds, tokens * batch_size)
    return chosen


def test_it_is_used_where_it_pays_and_the_plain_way_is_tried_now_and_then():
    chosen = run(Worth(5), 1000, gain=1.5)
    assert chosen[0] == 5
    assert 0 in chosen[: 3 * TRIAL]
    assert sum(ahead == 5 for ahead in chosen) > 970


def test_it_is_left_alone_where_it_does_not_pay_and_is_tried_ever_more_seldom():
    worth = Worth(5)
    chosen = run(worth, 1000, gain=0.8)
    assert sum(ahead == 5 for ahead in chosen) < 30
    assert 5 in chosen[100:]
    later = run(worth, 8000, gain=0.8)
    assert 0 < sum(ahead == 5 for ahead in later) <= 4 * TRIAL


def test_what_changes_is_noticed():
    worth = Worth(5)
    run(worth, 300, gain=0.7)
    assert run(worth, 3000, gain=2.0)[-1] == 5
    assert run(worth, 3000, gain=0.5)[-1] == 0


def test_a_step_that_is_held_up_changes_nothing():
    chosen = run(Worth(5), 2000, gain=1.3, slow_every=7)
    assert sum(ahead == 5 for ahead in chosen) > 1900


def test_every_batch_size_is_judged_by_itself():
    worth = Worth(4)
    for _ in range(300):
        run(worth, 1, gain=1.6, batch_size=1)
        run(worth, 1, gain=0.6, batch_size=32)
    assert worth.num_ahead(1) == 4
    assert worth.num_ahead(40) == 0
