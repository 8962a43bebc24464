"""StateSlots: which places for the states of recurrent layers are free. A running sequence has one, in all layers."""

from __future__ import annotations

from flambeau.llm.core.sequence import Sequence


class StateSlots:
    """Slots from 1; slot 0 is for padding and belongs to no sequence. Without slots, sequences have no state."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._free = [*range(number, 0, -1)]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, sequence: Sequence) -> None:
        """Give a slot to a sequence; no more than `number` have one at a time."""
        if self.number:
            sequence.state_slot = self._free.pop()

    def free(self, sequence: Sequence) -> None:
        """Take the slot of a sequence, if it has one; its next computation begins without a state."""
        if sequence.state_slot:
            self._free.append(sequence.state_slot)
            sequence.state_slot = 0
