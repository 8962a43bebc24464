"""StateSlots: places for the states of recurrent layers, and what is in them.

A running sequence has one slot, in all layers. Slots that no sequence needs hold snapshots: states at the end of a
cached block. A prompt that begins with the same blocks goes on from there.

Spare slots are lent for one step, in which proposed tokens are verified: each of them leaves its state in a slot of its
own. The sequence goes on from that of the last accepted token, in whatever slot it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import NamedTuple

from flambeau.llm.core.sequence import Sequence

MIN_SPARED_TOKENS = 128  # that a snapshot must save a later prompt: it divides a prompt into one more step


class StateCopy(NamedTuple):
    """A copy from one slot to another, in all layers."""

    source: int
    target: int


class StateSlots:
    """Slots from 1; slot 0 is for padding and belongs to no sequence. Without slots, sequences have no state.

    `number` slots are for sequences and snapshots. `num_spare` others are for proposed tokens.
    """

    def __init__(self, number: int = 0, num_spare: int = 0) -> None:
        self.number, self.num_spare = number, num_spare
        self._free = [*range(number + num_spare, 0, -1)]
        self._num_lent = 0
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # serial of a block's content → slot; oldest use first
        self._copies: list[StateCopy] = []

    @property
    def num_free(self) -> int:
        """Slots that a sequence can have, those of snapshots included."""
        return self._num_unused + len(self._snapshots)

    @property
    def _num_unused(self) -> int:
        """Slots that neither a sequence nor a snapshot has, spare ones not counted."""
        return len(self._free) + self._num_lent - self.num_spare

    def num_restorable(self, serials: Many[int]) -> int:
        """How many of these blocks, which follow each other, end with the last snapshot among them."""
        return next((i for i in range(len(serials), 0, -1) if serials[i - 1] in self._snapshots), 0)

    def allocate(self, sequence: Sequence, snapshot: int | None = None) -> None:
        """Give a slot to a sequence, with the state of a snapshot if it begins with one.

        No more than `number` sequences have a slot at a time.
        """
        if not self.number:
            return
        source = 0
        if snapshot is not None:
            source = self._snapshots[snapshot]
            self._snapshots.move_to_end(snapshot)
        sequence.state_slot = self._take()
        if source not in (0, sequence.state_slot):  # else it has taken the slot of its own snapshot
            self._copies.append(StateCopy(source, sequence.state_slot))

    def _take(self) -> int:
        return self._free.pop() if self._num_unused else self._snapshots.popitem(last=False)[1]

    def free(self, sequence: Sequence) -> None:
        """Take the slot of a sequence, if it has one; its next computation begins without a state."""
        self.settle(sequence, 0)
        if sequence.state_slot:
            self._free.append(sequence.state_slot)
            sequence.state_slot = 0

    def lend(self, sequence: Sequence, number: int) -> None:
        """Lend a sequence spare slots for one step; no more than there are for all sequences together."""
        assert self._num_lent + number <= self.num_spare, "there are too few spare slots"
        sequence.spare_slots = [self._free.pop() for _ in range(number)]
        self._num_lent += number

    def settle(self, sequence: Sequence, num_accepted: int) -> None:
        """Take spare slots back; the sequence keeps the one with the state after its last accepted token."""
        slots = sequence.spare_slots
        if num_accepted > 0 and slots:
            slots[num_accepted - 1], sequence.state_slot = sequence.state_slot, slots[num_accepted - 1]
        self._free += slots
        self._num_lent -= len(slots)
        sequence.spare_slots = []

    def keep(self, sequence: Sequence, serial: int) -> None:
        """Make a snapshot of a sequence that has computed its tokens up to the end of this block and none behind it.

        Nothing is kept if sequences need all slots.
        """
        if serial in self._snapshots:
            self._snapshots.move_to_end(serial)
        elif self.num_free:
            self._snapshots[serial] = target = self._take()
            self._copies.append(StateCopy(sequence.state_slot, target))

    def drop(self, serial: int) -> None:
        """Free the snapshot of a block that was evicted, if there is one."""
        if (slot := self._snapshots.pop(serial, None)) is not None:
            self._free.append(slot)

    def take_copies(self) -> list[StateCopy]:
        """The copies to make, one after the other, before the next step is computed."""
        copies, self._copies = self._copies, []
        return copies


def snapshot_ends(num_tokens: int, num_computed: int, num_matched: int, block_size: int) -> tuple[int, ...]:
    """Where the state of a prompt is kept: how many of its tokens are computed then.

    These are the end of the `num_matched` tokens that an earlier prompt began with, where further ones may part from
    it too, and the end of the last block before the last token, for the next turn of a conversation.
    """
    ends: list[int] = []
    start = num_computed
    for end in (num_matched, (num_tokens - 1) // block_size * block_size):
        if end - start >= MIN_SPARED_TOKENS:
            ends.append(end)
            start = end
    return tuple(ends)


def until_snapshot(ends: Iterable[int], num_computed: int, length: int) -> int:
    """The length of a chunk that goes no further than the next place where the state is kept."""
    return min((end - num_computed for end in ends if num_computed < end < num_computed + length), default=length)
