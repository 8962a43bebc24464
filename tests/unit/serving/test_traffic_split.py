"""Which version gets a request that names none."""

from __future__ import annotations

from collections import Counter

import pytest

from flambeau.serving.traffic_split import KEY_HEADER, TrafficSplit


def split_of(shares: dict[str, int], absent: tuple[str, ...] = ()) -> TrafficSplit[str]:
    return TrafficSplit("1.0", shares, lambda version: version not in absent)


def with_key(number: int) -> list[tuple[str, str]]:
    return [("X-Flambeau-Traffic-Key", f"user-{number}")]


@pytest.mark.parametrize("shares", [{"2.0": 1}, {"2.0": 10}, {"2.0": 50, "3.0": 25}, {"2.0": 100}])
def test_of_a_hundred_requests_each_version_gets_its_percentage(shares):
    split = split_of(shares)
    for _ in range(3):
        found = Counter(split.choose([]) for _ in range(100))
        assert found == Counter({**shares, "1.0": 100 - sum(shares.values())})


def test_requests_are_spread_evenly_in_an_order_that_does_not_repeat():
    split = split_of({"2.0": 20})
    rounds = [[split.choose([]) for _ in range(5)] for _ in range(100)]
    assert {each.count("2.0") for each in rounds} == {1}
    assert {each.index("2.0") for each in rounds} == {
        0,
        1,
        2,
        3,
        4,
    }  # clients that repeat a pattern reach both versions


def test_a_key_stays_with_its_version_while_that_one_grows():
    smaller, larger = split_of({"2.0": 10}), split_of({"2.0": 40})
    chosen = {number: smaller.choose(with_key(number)) for number in range(2000)}
    assert chosen == {number: smaller.choose(with_key(number)) for number in range(2000)}
    assert 0.07 < Counter(chosen.values())["2.0"] / 2000 < 0.13
    assert all(larger.choose(with_key(number)) == "2.0" for number, version in chosen.items() if version == "2.0")


def test_a_version_that_cannot_answer_gets_nothing():
    split = split_of({"2.0": 100}, absent=("2.0",))
    assert {split.choose([]) for _ in range(10)} == {"1.0"}
    assert split.choose([(KEY_HEADER, "user")]) == "1.0"


def test_percentages_are_known():
    split = split_of({"2.0": 30})
    assert [split.percent_of(version) for version in ("1.0", "2.0", "3.0")] == [70, 30, 0]
