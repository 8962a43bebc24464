"""Blocks are counted exactly: who uses them, what they hold, and when they are given away."""

from __future__ import annotations

import random

from flambeau.llm.core.block_pool import BlockPool


def computed(pool: BlockPool, tokens: list[int]) -> list[int]:
    """The blocks of a sequence, all full ones published."""
    shared, serials = pool.match_prefix(tokens)
    parent = serials[-1] if serials else 0
    pool.share(shared)
    blocks = shared + pool.allocate(pool.num_needed(len(tokens)) - len(shared))
    for i in range(len(shared), len(tokens) // pool.block_size):
        start = i * pool.block_size
        parent = pool.cache_block(blocks[i], parent, tokens[start : start + pool.block_size])
    return blocks


def test_block_0_is_never_given_away():
    pool = BlockPool(5, 4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_a_prompt_that_begins_the_same_way_shares_its_full_blocks():
    pool = BlockPool(20, 4)
    first = computed(pool, [*range(10)])
    second = computed(pool, [*range(8), 99, 98])
    assert second[:2] == first[:2]
    assert second[2] != first[2]
    assert pool.num_used == 4


def test_content_after_another_beginning_is_not_the_same():
    pool = BlockPool(20, 4)
    computed(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.match_prefix([9, 9, 9, 9, 5, 6, 7, 8])[0] == []


def test_what_nobody_uses_is_kept_until_the_room_is_needed():
    pool = BlockPool(5, 4)
    blocks = computed(pool, [*range(8)])
    pool.free(blocks)
    assert pool.num_used == 0
    assert pool.match_prefix([*range(8)])[0] == blocks
    pool.allocate(3)  # two that were empty, and the last of the kept ones: a beginning is worth more than an end
    assert pool.match_prefix([*range(8)])[0] == blocks[:1]


def test_evicted_content_is_reported_by_its_serial():
    evicted: list[int] = []
    pool = BlockPool(5, 4, on_evict=evicted.append)
    pool.free(computed(pool, [*range(8)]))
    _, serials = pool.match_prefix([*range(8)])
    pool.allocate(4)
    assert evicted == [serials[1], serials[0]]


def test_a_shared_block_is_free_when_the_last_user_has_left():
    pool = BlockPool(10, 4)
    first, second = computed(pool, [*range(4)]), computed(pool, [*range(4)])
    pool.free(first)
    assert pool.num_used == 1
    pool.free(second)
    assert pool.num_used == 0


def test_without_prefixes_nothing_is_shared():
    pool = BlockPool(10, 4, prefix_cache=False)
    computed(pool, [*range(8)])
    assert pool.match_prefix([*range(8)])[0] == []


def test_blocks_are_neither_lost_nor_given_twice():
    rng = random.Random(0)
    pool = BlockPool(40, 2)
    held: list[list[int]] = []
    for _ in range(2000):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        if pool.num_free >= pool.num_needed(len(tokens)) and rng.random() < 0.6:
            held.append(computed(pool, tokens))
        elif held:
            pool.free(held.pop(rng.randrange(len(held))))
        used = {block for blocks in held for block in blocks}
        assert pool.num_used == len(used)
        assert 0 not in used
    for blocks in held:
        pool.free(blocks)
    assert pool.num_free == pool.num_blocks


class Store:
    """Keeps every block that it is offered."""

    def __init__(self):
        self.offered: dict[bytes, int] = {}
        self.num_free = 0

    def __contains__(self, key):
        return key in self.offered

    def offer(self, block, content, key):
        self.offered[key] = block

    def set_num_free(self, number):
        self.num_free = number


def test_blocks_without_users_are_offered_under_the_same_keys_in_every_pool():
    tokens, stores = [*range(12)], [Store(), Store()]
    for store in stores:
        pool = BlockPool(9, 4, store=store)
        pool.set_root(0, b"weights")
        pool.free(computed(pool, tokens))
        assert store.num_free == 8
    assert [*stores[0].offered] == [*stores[1].offered]
    fresh = BlockPool(9, 4, store=stores[0])
    assert fresh.match_stored(tokens, 0, 0) == []  # nothing is known about this root
    fresh.set_root(0, b"weights")
    assert fresh.match_stored(tokens, 0, 0) == [*reversed(stores[0].offered)]
    assert fresh.match_stored([*tokens[:8], 99, 98, 97, 96], 0, 0) == [*reversed(stores[0].offered)][:2]
    fresh.set_root(-1, b"adapter")
    assert fresh.match_stored(tokens, 0, -1) == []


def test_a_block_holds_its_content_until_it_is_evicted():
    store = Store()
    pool = BlockPool(3, 4, store=store)
    pool.set_root(0, b"weights")
    (block,) = computed(pool, [1, 2, 3, 4])
    content = pool._contents[block]
    pool.free([block])
    assert pool.holds(block, content)
    pool.free(pool.allocate(2))
    assert not pool.holds(block, content)
    pool.free(computed(pool, [1, 2, 3, 4]))
    assert not pool.holds(block, content)  # the same tokens, computed again


def test_what_is_more_than_tokens_is_not_offered():
    store = Store()
    pool = BlockPool(9, 2, store=store)
    pool.set_root(0, b"weights")
    pool.free(computed(pool, [1, 2, ("image", 0), 3, 4, 5]))
    assert len(store.offered) == 1
    assert len(pool.match_stored([1, 2, ("image", 0), 3], 0, 0)) == 1
