"""HostBlocks: places for blocks in host memory, by key. The block used least recently loses its place first."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict


class HostBlocks:
    """Which place holds which block. Places that are being copied are pinned and kept. Any thread may call."""

    def __init__(self, num_places: int) -> None:
        self._mutex = threading.Lock()
        self._free: list[int] = [*range(num_places)]
        self._places: OrderedDict[bytes, int] = OrderedDict()  # by key, the oldest first
        self._pins: Counter[bytes] = Counter()

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def take(self) -> int | None:
        """An empty place, which belongs to the caller until `add` or `give_back`; None if all are in use."""
        with self._mutex:
            if self._free:
                return self._free.pop()
            oldest = next((key for key in self._places if not self._pins[key]), None)
            if oldest is None:
                return None
            return self._places.pop(oldest)

    def give_back(self, place: int) -> None:
        with self._mutex:
            self._free.append(place)

    def add(self, key: bytes, place: int) -> None:
        """The place holds this block from now on; it is pinned."""
        with self._mutex:
            if key in self._places:  # another thread was faster
                self._free.append(place)
            else:
                self._places[key] = place
            self._pins[key] += 1

    def pin(self, key: bytes) -> int | None:
        """The place of a block, which is kept until `unpin`; None if it has none."""
        with self._mutex:
            place = self._places.get(key)
            if place is not None:
                self._places.move_to_end(key)
                self._pins[key] += 1
            return place

    def touch(self, key: bytes) -> None:
        """The block was used."""
        with self._mutex:
            if key in self._places:
                self._places.move_to_end(key)

    def unpin(self, key: bytes) -> None:
        with self._mutex:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
