"""As many tokens are proposed as pay, and what did not pay is tried again now and then."""

import random

import pytest

from flambeau.llm.speculation.adaptive_k import MIN_GAIN, TRIAL, AdaptiveK, candidate_numbers


class World:
    """Steps whose proposals are accepted with some probability, and which take longer the more are proposed."""

    def __init__(self, *, kept: float, price: float, slow_every: int = 0) -> None:
        self.kept, self.price, self._slow_every = kept, price, slow_every
        self._rng = random.Random(1)

    def run(self, adaptive_k: AdaptiveK, steps: int, batch_size: int = 1) -> list[int]:
        """What was proposed in each step."""
        chosen = []
        for step in range(steps):
            ahead = adaptive_k.num_ahead(batch_size)
            chosen.append(ahead)
            is_slow = self._slow_every and step % self._slow_every == 0
            seconds = (1 + self.price * ahead) * (50 if is_slow else 1)
            adaptive_k.record(batch_size, ahead, seconds, [self._num_kept(ahead) for _ in range(batch_size)])
        return chosen

    def _num_kept(self, ahead: int) -> int:
        return next((place for place in range(ahead) if self._rng.random() > self.kept), ahead)

    def tokens_per_s(self, ahead: int) -> float:
        """In the long run."""
        return sum(self.kept**i for i in range(ahead + 1)) / (1 + self.price * ahead)


NUMBERS = candidate_numbers(5)


@pytest.mark.parametrize(("kept", "price"), [(0.9, 0.1), (0.5, 0.1), (0.6, 0.05), (0.3, 0.2), (0.1, 0.3), (0.0, 0.1)])
def test_as_many_are_proposed_as_pay(kept: float, price: float) -> None:
    world = World(kept=kept, price=price)
    chosen = world.run(AdaptiveK(NUMBERS), 2000)[200:]
    reached = sum(map(world.tokens_per_s, chosen)) / len(chosen)
    assert reached > 0.99 / MIN_GAIN * max(map(world.tokens_per_s, NUMBERS))


def test_what_does_not_pay_is_tried_ever_more_seldom() -> None:
    world, adaptive_k = World(kept=0.1, price=0.5), AdaptiveK(NUMBERS)
    chosen = world.run(adaptive_k, 1000)
    assert set(chosen[: len(NUMBERS) * TRIAL]) == set(NUMBERS)
    assert 0 < sum(number > 0 for number in chosen[100:]) <= 4 * TRIAL
    assert 0 < sum(number > 0 for number in world.run(adaptive_k, 8000)) <= 9 * TRIAL


def test_what_changes_is_noticed() -> None:
    world, adaptive_k = World(kept=0.1, price=0.3), AdaptiveK([5, 0])
    assert world.run(adaptive_k, 300)[-1] == 0
    world.kept = 0.95
    assert world.run(adaptive_k, 5000)[-1] == 5
    world.kept = 0.1
    assert world.run(adaptive_k, 3000)[-1] == 0


def test_what_is_not_kept_any_more_is_noticed_soon() -> None:
    world, adaptive_k = World(kept=0.95, price=0.3), AdaptiveK(NUMBERS)
    world.run(adaptive_k, 3000)
    world.kept = 0.02
    assert sum(number == 0 for number in world.run(adaptive_k, 300)) > 200


def test_a_step_that_is_held_up_changes_nothing() -> None:
    chosen = World(kept=0.8, price=0.1, slow_every=7).run(AdaptiveK([4, 0]), 2000)
    assert sum(number == 4 for number in chosen) > 1900


def test_every_kind_of_batch_is_judged_by_itself() -> None:
    adaptive_k, cheap, dear = AdaptiveK([4, 0]), World(kept=0.7, price=0.05), World(kept=0.7, price=0.9)
    for _ in range(300):
        cheap.run(adaptive_k, 1, batch_size=1)
        dear.run(adaptive_k, 1, batch_size=32)
    assert adaptive_k.num_ahead(1) == 4
    assert adaptive_k.num_ahead(32) == 0


def test_sensible_numbers_are_few() -> None:
    assert candidate_numbers(1) == [1, 0]
    assert candidate_numbers(5) == [5, 0, 1, 2, 3]
    assert candidate_numbers(12) == [12, 0, 1, 2, 3, 5, 8]
