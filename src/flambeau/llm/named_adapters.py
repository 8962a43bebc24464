"""NamedAdapters: the adapters of an engine by the names that requests have; each is freed when its last one ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from flambeau.llm.core.block_pool import BlockPool
from flambeau.llm.errors import InvalidRequest, LLMError
from flambeau.llm.kv_store.block_store import BlockStore


class Adapters(Protocol):
    """The adapters of a network by number, on all its ranks."""

    def load(self, number: int, folder: Path) -> None:
        """Read an adapter; raises CheckpointError if it cannot be used."""

    def unload(self, number: int) -> None:
        """Free an adapter that no sequence uses."""


class NamedAdapters:
    """Gives each adapter a number; the prefixes of its sequences have a root of their own."""

    def __init__(
        self,
        adapters: Adapters | None,
        pool: BlockPool,
        store: BlockStore | None,
        *,
        merged: Iterable[str] = (),
        is_used: Callable[[int], bool],
    ) -> None:
        """`merged` are in the weights already, and no others can be used beside them."""
        self._adapters, self._pool, self._store, self._is_used = adapters, pool, store, is_used
        self._merged = [*merged]
        self._numbers = dict.fromkeys(self._merged, 0)
        self._unloaded: set[int] = set()  # that are freed when their last sequence ends
        self._next = itertools.count(1)

    @property
    def names(self) -> list[str]:
        return [*self._numbers]

    def number_of(self, name: str) -> int:
        """The number of an adapter; 0 without a name, or if it is merged."""
        if not name:
            return 0
        if name not in self._numbers:
            known = ", ".join(self._numbers) or "none"
            raise InvalidRequest(f"there is no adapter {name!r}; there is {known}", "model")
        return self._numbers[name]

    def load(self, name: str, folder: Path) -> None:
        """Raises LLMError if the adapter cannot be used."""
        if self._adapters is None:
            raise LLMError("adapters need the engine's own network, loaded with load_engine")
        if self._merged:
            raise LLMError(
                f"the adapter {', '.join(self._merged)} is merged into the weights, and no other can be used beside "
                "it; leave merge_lora out"
            )
        if not name:
            raise LLMError("an adapter needs a name")
        if name in self._numbers:
            raise LLMError(f"there is an adapter {name!r} already; unload it first, or choose another name")
        number = next(self._next)
        self._adapters.load(number, folder)
        self._numbers[name] = number
        if self._store is not None:
            self._pool.set_root(-number, self._store.adapter_root(number, folder))

    def unload(self, name: str) -> None:
        """Accept no more requests for an adapter; it is freed when the last one that runs has ended."""
        number = self.number_of(name)
        if not number:
            raise LLMError(f"the adapter {name!r} is merged into the weights and cannot be unloaded")
        del self._numbers[name]
        self._unloaded.add(number)
        self.free_unused()

    def free_unused(self) -> None:
        """Free those that were unloaded and that no sequence uses any more."""
        for number in [number for number in self._unloaded if not self._is_used(number)]:
            assert self._adapters is not None
            self._unloaded.discard(number)
            self._adapters.unload(number)
            self._pool.forget_root(-number)
