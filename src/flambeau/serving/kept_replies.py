"""KeptReplies: replies by their keys, each until it expires, and all of them up to a size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class KeptReply(Protocol):
    @property
    def size_bytes(self) -> int: ...

    @property
    def expires(self) -> float: ...


Key = TypeVar("Key", bound=Hashable)
Entry = TypeVar("Entry", bound=KeptReply)


class KeptReplies(Generic[Key, Entry]):
    """The first to leave is the one that was kept, or `touch`ed, before all others."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self.size_bytes = 0

    def find(self, key: Key, now: float) -> Entry | None:
        entry = self._entries.get(key)
        if entry is not None and now >= entry.expires:
            self.drop(key)
            return None
        return entry

    def touch(self, key: Key) -> None:
        self._entries.move_to_end(key)

    def keep(self, key: Key, entry: Entry) -> None:
        """Keep a reply instead of the one before it; one that is larger than all may be is not kept."""
        self.drop(key)
        if entry.size_bytes > self.max_bytes:
            return
        self._entries[key] = entry
        self.size_bytes += entry.size_bytes
        while self.size_bytes > self.max_bytes:
            self.drop(next(iter(self._entries)))

    def drop(self, key: Key) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self.size_bytes -= entry.size_bytes

    def clear(self) -> None:
        self._entries.clear()
        self.size_bytes = 0
