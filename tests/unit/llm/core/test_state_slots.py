"""Slots hold the states of running sequences; what is left holds snapshots."""

from __future__ import annotations

from flambeau.llm.core.sequence import NoDetokenizer, Sequence
from flambeau.llm.core.state_slots import StateSlots, snapshot_ends, until_snapshot
from flambeau.llm.sampling_params import SamplingParams


def new() -> Sequence:
    return Sequence(
        request_id="one",
        index=0,
        tokens=[1, 2, 3],
        num_prompt=3,
        params=SamplingParams(),
        seed=0,
        max_length=9,
        detokenizer=NoDetokenizer(),
    )


def running(slots: StateSlots, snapshot: int | None = None) -> Sequence:
    sequence = new()
    slots.allocate(sequence, snapshot)
    return sequence


def test_a_snapshot_is_copied_before_and_after_a_step():
    slots = StateSlots(3)
    first = running(slots)
    slots.keep(first, 7)
    assert slots.take_copies() == [(first.state_slot, 2)]
    second = running(slots, 7)
    assert slots.take_copies() == [(2, second.state_slot)]
    assert slots.take_copies() == []
    assert {first.state_slot, second.state_slot} == {1, 3}


def test_a_snapshot_that_is_there_is_not_copied_again():
    slots = StateSlots(3)
    first = running(slots)
    slots.keep(first, 7)
    slots.take_copies()
    slots.keep(first, 7)
    assert slots.take_copies() == []


def test_the_snapshot_used_least_recently_makes_place():
    slots = StateSlots(3)
    first = running(slots)
    slots.keep(first, 7)
    slots.keep(first, 8)
    second = running(slots, 7)
    assert slots.num_restorable([8]) == 0
    assert slots.num_restorable([6, 7, 9]) == 2
    assert slots.num_free == 1
    slots.free(second)
    assert slots.num_free == 2


def test_a_sequence_may_take_the_slot_of_its_own_snapshot():
    slots = StateSlots(2)
    first = running(slots)
    slots.keep(first, 7)
    slots.take_copies()
    second = running(slots, 7)
    assert second.state_slot == 2
    assert slots.take_copies() == []
    assert slots.num_restorable([7]) == 0


def test_nothing_is_kept_where_sequences_need_all_slots():
    slots = StateSlots(1)
    slots.keep(running(slots), 7)
    assert slots.take_copies() == []
    assert slots.num_restorable([7]) == 0


def test_spare_slots_are_for_one_step():
    slots = StateSlots(3, num_spare=4)
    one, other = running(slots), running(slots)
    before = one.state_slot
    slots.lend(one, 2)
    slots.lend(other, 2)
    lent = [*one.spare_slots]
    assert len({one.state_slot, other.state_slot, *lent, *other.spare_slots}) == 6
    assert slots.num_free == 1
    slots.settle(one, 2)
    assert (one.state_slot, one.spare_slots) == (lent[1], [])
    slots.settle(other, 0)
    assert slots.num_free == 1
    slots.lend(one, 4)
    assert {before, lent[0]} <= {*one.spare_slots, *slots._free}
    slots.free(one)
    slots.free(other)
    assert slots.num_free == 3
    assert sorted(slots._free) == [1, 2, 3, 4, 5, 6, 7]


def test_spare_slots_are_not_for_snapshots():
    slots = StateSlots(2, num_spare=2)
    first = running(slots)
    slots.keep(first, 7)
    slots.keep(first, 8)
    assert slots.num_restorable([7]) == 0
    assert slots.num_restorable([8]) == 1
    slots.lend(first, 2)
    assert running(slots).state_slot not in (0, first.state_slot, *first.spare_slots)
    assert slots.num_restorable([8]) == 0


def test_the_snapshot_of_an_evicted_block_is_freed():
    slots = StateSlots(2)
    slots.keep(running(slots), 7)
    slots.drop(7)
    slots.drop(8)
    assert slots.num_restorable([7]) == 0
    assert slots.num_free == 1


def test_states_are_kept_where_prompts_part_and_at_the_end_if_that_spares_much():
    assert snapshot_ends(1000, 0, 0, 16) == (992,)
    assert snapshot_ends(992, 0, 0, 16) == (976,)  # the last token is computed for its logits
    assert snapshot_ends(1000, 0, 512, 16) == (512, 992)
    assert snapshot_ends(1000, 512, 512, 16) == (992,)
    assert snapshot_ends(600, 0, 512, 16) == (512,)
    assert snapshot_ends(600, 512, 560, 16) == ()
    assert snapshot_ends(100, 0, 0, 16) == ()


def test_a_chunk_ends_where_the_state_is_kept():
    assert until_snapshot((512, 992), 0, 600) == 512
    assert until_snapshot((512, 992), 512, 600) == 480
    assert until_snapshot((512, 992), 992, 8) == 8
    assert until_snapshot((), 0, 600) == 600
