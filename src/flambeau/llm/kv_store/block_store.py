"""BlockStore: keeps the content of blocks that leave the KV cache, in host memory and on disk, and brings it back.

Two threads copy, one in each direction, while steps run. A block is copied while it still counts as cached; if it was
evicted before the copy was complete, the copy is dropped. So no step ever waits for a copy.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from flambeau.llm.config import EngineConfig
from flambeau.llm.core.block_pool import BlockContent, BlockPool
from flambeau.llm.errors import LLMError
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.executor.tensor_parallel import TensorParallelGroup
from flambeau.llm.kv_store.disk_blocks import DiskBlocks
from flambeau.llm.kv_store.fingerprint import adapter_key, fingerprint
from flambeau.llm.kv_store.host_blocks import HostBlocks
from flambeau.llm.kv_store.rank_store import StoreFollower, StoreLeader, common_root, new_store_group
from flambeau.llm.kv_store.transfer import BlockTransfer, block_bytes, make_transfer

logger = logging.getLogger(__name__)

MB = 1 << 20
GROUP_BYTES = 32 * MB  # copied at a time
MIN_GROUPS = 4  # in host memory: one in each direction, and as many again
STAGING_MB = 128  # of host memory for a store on disk only
DISK_MB = 10240  # unless kv_disk_mb is set
FLUSH_S = 5.0  # at the end: how long blocks are written that are not on disk yet


@dataclass(slots=True)
class Restore:
    """Blocks that are being copied into the cache."""

    num_restored: int = 0  # from the first; the others were not found
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def is_done(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout_s: float) -> None:
        self.done.wait(timeout_s)


@dataclass(frozen=True, slots=True)
class Offer:
    """A block that no sequence uses, and that may be evicted soon."""

    block: int
    content: BlockContent
    key: bytes


class BlockStore:
    """Made with an engine, which calls `connect` once its pool exists."""

    def __init__(self, transfer: BlockTransfer, root: bytes, *, max_group: int, disk: DiskBlocks | None = None) -> None:
        self.root = root
        self.num_saved = self.num_restored = 0
        self._transfer, self._disk, self._max_group = transfer, disk, max_group
        self._ranks = transfer if isinstance(transfer, StoreLeader) else None
        self._host = HostBlocks(len(transfer.places))
        self._offers: OrderedDict[bytes, Offer] = OrderedDict()
        self._changed = threading.Condition()  # of the offers, or of what is free
        self._is_closing = False
        self._is_saving = False
        self._holds: Callable[[int, BlockContent], bool] = lambda block, content: False
        self._num_free = self._num_kept_ready = 0
        self._loader = ThreadPoolExecutor(1, "kv-restore")
        self._saver = threading.Thread(target=self._save_offers, name="kv-save", daemon=True)

    def connect(self, pool: BlockPool) -> None:
        """Save the blocks of this pool from now on."""
        self._holds, self._num_free = pool.holds, pool.num_free
        self._num_kept_ready = num_kept_ready(pool.num_blocks, len(self._transfer.places))
        self._saver.start()

    def adapter_root(self, number: int, folder: Path) -> bytes:
        """What comes before the first block of sequences with an adapter; numbers are never used again."""
        if self._disk is None:
            return self.root + number.to_bytes(8, "little")
        return adapter_key(self.root, folder)

    def close(self) -> None:
        """Write what is not on disk yet, for a few seconds, and stop."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._saver.is_alive():
            self._saver.join(FLUSH_S)
        self._loader.shutdown(wait=True, cancel_futures=True)
        if self._ranks is not None:
            self._ranks.close()
        if self._disk is not None:
            self._disk.close()

    # ---- out of the cache ----

    def offer(self, block: int, content: BlockContent, key: bytes) -> None:
        """No sequence uses this block now. It is saved before it is likely to be evicted."""
        if key in self._host:
            self._host.touch(key)
        if key in (self._host if self._disk is None else self._disk):
            return
        with self._changed:
            self._offers[key] = Offer(block, content, key)
            self._offers.move_to_end(key)

    def set_num_free(self, number: int) -> None:
        """How many blocks can be allocated, those with content included."""
        self._num_free = number
        if self._offers and not self._is_saving and self._is_due():
            with self._changed:
                self._changed.notify_all()

    def _is_due(self) -> bool:
        return bool(self._offers) and (
            self._disk is not None or self._num_free - len(self._offers) < self._num_kept_ready
        )

    def _save_offers(self) -> None:
        while True:
            with self._changed:
                self._is_saving = False
                self._changed.wait_for(lambda: self._is_closing or self._is_due())
                if self._is_closing and (self._disk is None or not self._offers):
                    return
                self._is_saving = True
                number = min(self._max_group, len(self._offers))
                offers = [self._offers.popitem(last=False)[1] for _ in range(number)]
            try:
                self._save(offers)
            except Exception:  # the engine goes on without these blocks
                logger.exception("blocks of the KV cache could not be saved")

    def _save(self, offers: Sequence[Offer]) -> None:
        wanted = [each for each in offers if each.key not in self._host and self._holds(each.block, each.content)]
        places = [place for _ in wanted if (place := self._host.take()) is not None]
        wanted = wanted[: len(places)]
        saved = self._copy_out(wanted, places)
        self.num_saved += len(saved)
        if self._disk is not None:
            saved += [each.key for each in offers if each.key not in saved and self._host.pin(each.key) is not None]
        for key in saved:
            self._write(key)
            self._host.unpin(key)

    def _copy_out(self, offers: Sequence[Offer], places: Sequence[int]) -> list[bytes]:
        """The keys of what was copied; they are pinned."""
        saved: list[bytes] = []
        is_copied = False
        try:
            self._transfer.copy_out([each.block for each in offers], places)
            is_copied = True
        finally:
            for each, place in zip(offers, places, strict=True):
                # Of a block that was evicted meanwhile, the copy may have bytes of what came after.
                if is_copied and self._holds(each.block, each.content):
                    self._host.add(each.key, place)
                    saved.append(each.key)
                else:
                    self._host.give_back(place)
        return saved

    def _write(self, key: bytes) -> None:
        """Write a pinned block to disk, if there is one."""
        if self._disk is None or (place := self._host.pin(key)) is None:
            return
        try:
            self._disk.write(key, self._transfer.places[place])
            if self._ranks is not None:
                self._ranks.write(key, place)
        finally:
            self._host.unpin(key)

    # ---- back into the cache ----

    def __contains__(self, key: bytes) -> bool:
        return key in self._host or (self._disk is not None and key in self._disk)

    def restore(self, keys: Sequence[bytes], blocks: Sequence[int]) -> Restore:
        """Start copying stored blocks to these blocks, which belong to the caller until it is done."""
        restore = Restore()
        self._loader.submit(self._restore, [*keys], [*blocks], restore)
        return restore

    def _restore(self, keys: list[bytes], blocks: list[int], restore: Restore) -> None:
        try:
            for start in range(0, len(keys), self._max_group):
                group = keys[start : start + self._max_group]
                number = self._restore_group(group, blocks[start : start + len(group)])
                restore.num_restored += number
                self.num_restored += number
                if number < len(group):
                    self._forget_lost(keys[start + number + 1 :])
                    break
        except Exception:  # the tokens are computed instead
            logger.exception("blocks of the KV cache could not be restored")
        finally:
            restore.done.set()

    def _restore_group(self, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        pinned: list[bytes] = []
        places = []
        try:
            for key in keys:
                place = self._find(key)
                if place is None:
                    break
                pinned.append(key)
                places.append(place)
            self._transfer.copy_in(places, blocks[: len(places)])
        finally:
            for key in pinned:
                self._host.unpin(key)
        return len(places)

    def _forget_lost(self, keys: Sequence[bytes]) -> None:
        """Of blocks after one that was not found, forget those that another rank has lost, too."""
        for key in keys if self._ranks is not None else ():
            if self._find(key) is not None:
                self._host.unpin(key)

    def _find(self, key: bytes) -> int | None:
        """The pinned place of a block in host memory, where it is read from disk if needed."""
        place = self._host.pin(key)
        if place is not None or self._disk is None or key not in self._disk:
            return place
        empty = self._host.take()
        if empty is None:
            return None
        is_read = self._disk.read_into(key, self._transfer.places[empty])
        if is_read and self._ranks is not None and not self._ranks.read(key, empty):
            self._disk.delete(key)  # so that it is saved again on all ranks
            is_read = False
        if not is_read:
            self._host.give_back(empty)
            return None
        self._host.add(key, empty)
        place = self._host.pin(key)
        self._host.unpin(key)
        return place


def num_kept_ready(num_blocks: int, num_places: int) -> int:
    """How many blocks should be free or saved, so that they can be allocated without losing a prefix.

    A saved block may be in the cache for long, and then its place is of no use: those have half of the places.
    """
    return min(num_blocks, num_places // 2)


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """Places in host memory, and how many blocks are copied at a time."""

    num_places: int
    max_group: int

    @classmethod
    def of(cls, config: EngineConfig, cache: KVCache) -> StoreSizes:
        """Raises LLMError if the memory is too small for the cache's blocks."""
        size = block_bytes(cache)
        num_places = (config.kv_host_memory_mb or STAGING_MB) * MB // size
        if num_places < MIN_GROUPS:
            needed = -(-MIN_GROUPS * size // MB)
            raise LLMError(f"one block of the KV cache has {size} bytes; set kv_host_memory_mb to {needed} or more")
        return cls(num_places, max(1, min(GROUP_BYTES // size, num_places // MIN_GROUPS)))


def is_store_wanted(config: EngineConfig) -> bool:
    """Whether the configuration asks for a store; raises LLMError for settings that exclude each other."""
    if not config.kv_host_memory_mb and not config.kv_disk_folder:
        if config.kv_disk_mb is not None:
            raise LLMError("kv_disk_mb is set without kv_disk_folder; name the folder, or leave kv_disk_mb out")
        return False
    if not config.prefix_cache:
        raise LLMError("kv_host_memory_mb and kv_disk_folder keep prefixes, and prefix_cache is false; set it to true")
    return True


def open_disk(config: EngineConfig, ranks: TensorParallelGroup | None = None) -> DiskBlocks | None:
    """The folder on disk, if there is one; of several ranks each has its own."""
    if not config.kv_disk_folder:
        return None
    folder = Path(config.kv_disk_folder)
    if ranks is not None:
        folder /= f"rank-{ranks.rank}-of-{ranks.size}"
    return DiskBlocks(folder, (config.kv_disk_mb or DISK_MB) * MB)


def open_store(
    config: EngineConfig, cache: KVCache, model: nn.Module, description: str, ranks: TensorParallelGroup | None = None
) -> BlockStore | StoreFollower | None:
    """The store that the configuration asks for, or this rank's part of it; None if it asks for none."""
    if not is_store_wanted(config):
        return None
    sizes = StoreSizes.of(config, cache)
    root = fingerprint(cache, model, description) if config.kv_disk_folder else b"host"  # of this process only
    disk, transfer = open_disk(config, ranks), make_transfer(cache, sizes.num_places, sizes.max_group)
    if ranks is not None:
        root = common_root(root, ranks)
        if ranks.rank:
            return StoreFollower(transfer, disk, ranks)
        transfer = StoreLeader(transfer, new_store_group())
    return BlockStore(transfer, root, max_group=sizes.max_group, disk=disk)
