"""HiddenStates: what chosen layers of a network were given in its last pass, for a head that predicts from it.

Shapes: T tokens of the pass · M layers · E hidden
"""

from __future__ import annotations

import threading

from torch import Tensor


class HiddenStates:
    """The inputs of some layers, side by side; a backend writes them in every pass, and a proposer reads them.

    The layer after the last one stands for the output of the network before its last norm.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self._passes = threading.local()  # another thread may try out what it has compiled meanwhile

    def set(self, states_TX: Tensor) -> None:
        """Keep the states [T, M·E] of a pass; the next pass replaces them."""
        self._passes.last = states_TX

    def take(self) -> Tensor:
        """The states [T, M·E] of the last pass, once."""
        states_TX: Tensor = self._passes.last
        del self._passes.last
        return states_TX
