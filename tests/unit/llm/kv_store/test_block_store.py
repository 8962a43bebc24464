"""A prefix that comes back from host memory or from disk gives the tokens that a computed one gives."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flambeau.llm.errors import LLMError
from flambeau.llm.kv_store.block_store import num_kept_ready
from flambeau.llm.sampling_params import SamplingParams
from support.async_backend import AsyncEagerBackend
from support.tiny_models import ARCH, tiny_draft, tiny_engine, tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
WAIT_S = 60.0


def prompt_of(seed: int, length: int = 60) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(ARCH.vocab_size) for _ in range(length)]


PROMPTS = [prompt_of(seed) for seed in range(8)]


def until(is_true) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def generate(engine, prompt, **options) -> list[int]:
    return engine.generate([prompt], GREEDY, **options)[0].token_ids


def one_by_one(engine, **options):
    """Generate for each prompt, and wait between two until nothing is left to save."""
    completions = []
    for prompt in PROMPTS:
        completions += engine.generate([prompt], GREEDY, **options)
        until(lambda: not engine._store._is_due() and not engine._store._is_saving)
    return completions


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def expected(model):
    return [generate(tiny_engine(model), prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [{}, {"kind": AsyncEagerBackend}, {"max_step_tokens": 16}, {"speculation": "lookup"}, {"draft": True}],
    ids=["plain", "started ahead", "in chunks", "lookup", "draft"],
)
def test_an_evicted_prefix_comes_back_from_host_memory(model, expected, options):
    if "draft" in options:
        options = {"draft": tiny_draft(model)}
    engine = tiny_engine(model, num_blocks=40, kv_host_memory_mb=1, **options)
    first = one_by_one(engine)
    again = one_by_one(engine)
    engine.close()
    assert [completion.token_ids for completion in first] == expected
    assert [completion.token_ids for completion in again] == expected
    assert [completion.counts.num_cached for completion in first] == [0] * len(PROMPTS)
    assert all(completion.counts.num_cached >= 40 for completion in again)
    assert engine.state.num_blocks_saved > 39
    assert engine.state.num_blocks_restored > 39
    assert engine.state.num_blocks_used == 0


def test_layers_with_a_window_are_restored_too():
    model = tiny_model(replace(ARCH, windows=(8, None, 16)))
    expected = [generate(tiny_engine(model), prompt) for prompt in PROMPTS]
    engine = tiny_engine(model, num_blocks=40, kv_host_memory_mb=1)
    assert [completion.token_ids for completion in one_by_one(engine)] == expected
    assert [completion.token_ids for completion in one_by_one(engine)] == expected
    engine.close()
    assert engine.state.num_blocks_restored > 39


def test_a_prefix_is_on_disk_after_a_restart(model, expected, tmp_path):
    engine = tiny_engine(model, kv_disk_folder=str(tmp_path))
    one_by_one(engine)
    engine.close()
    engine = tiny_engine(model, kv_disk_folder=str(tmp_path))
    again = one_by_one(engine)
    engine.close()
    assert [completion.token_ids for completion in again] == expected
    assert [completion.counts.num_cached for completion in again] == [56] * len(PROMPTS)


def test_what_was_just_computed_is_written_when_the_engine_closes(model, expected, tmp_path):
    engine = tiny_engine(model, kv_disk_folder=str(tmp_path))
    generate(engine, PROMPTS[0])
    engine.close()
    engine = tiny_engine(model, kv_disk_folder=str(tmp_path))
    completion = engine.generate([PROMPTS[0]], GREEDY)[0]
    engine.close()
    assert (completion.token_ids, completion.counts.num_cached) == (expected[0], 56)


def test_what_another_rank_has_lost_is_saved_again(model, expected, tmp_path):
    written: list[bytes] = []
    others = SimpleNamespace(close=lambda: None, write=lambda key, place: written.append(key))
    for is_found, num_cached, num_written in ((True, 0, 16), (False, 0, 14), (True, 56, 0)):  # 14 are the prompt
        engine = tiny_engine(model, kv_disk_folder=str(tmp_path))
        others.read = lambda key, place, is_found=is_found: is_found
        engine._store._ranks = others
        completion = engine.generate([PROMPTS[0]], GREEDY)[0]
        engine.close()
        assert (completion.token_ids, completion.counts.num_cached) == (expected[0], num_cached)
        assert len(written) == num_written
        written.clear()


@pytest.mark.parametrize("other", ["weights", "block_size", "architecture"])
def test_blocks_of_another_network_are_not_used(model, tmp_path, other):
    engine = tiny_engine(model, kv_disk_folder=str(tmp_path))
    generate(engine, PROMPTS[0])
    engine.close()
    options = {"block_size": 8} if other == "block_size" else {}
    if other == "weights":
        model = tiny_model(seed=5)
    elif other == "architecture":
        changed = tiny_model(replace(ARCH, rope_theta=5000.0))
        model = changed
    engine = tiny_engine(model, kv_disk_folder=str(tmp_path), **options)
    completion = engine.generate([PROMPTS[0]], GREEDY)[0]
    engine.close()
    assert completion.counts.num_cached == 0
    assert completion.token_ids == generate(tiny_engine(model), PROMPTS[0])


def test_damaged_files_are_computed_anew(model, expected, tmp_path, caplog):
    engine = tiny_engine(model, kv_disk_folder=str(tmp_path))
    one_by_one(engine)
    engine.close()
    for i, file in enumerate(sorted(tmp_path.glob("*/*.kv"))):
        data = bytearray(file.read_bytes())
        data[-1 - i % 50] ^= 1
        file.write_bytes(data[: len(data) - i % 3])
    engine = tiny_engine(model, kv_disk_folder=str(tmp_path))
    again = one_by_one(engine)
    engine.close()
    assert [completion.token_ids for completion in again] == expected
    assert [completion.counts.num_cached for completion in again] == [0] * len(PROMPTS)
    assert "damaged" in caplog.text


def test_sequences_with_the_same_prefix_wait_for_one_restore(model, tmp_path):
    engine = tiny_engine(model, kv_disk_folder=str(tmp_path))
    generate(engine, PROMPTS[0])
    engine.close()
    prompts = [[*PROMPTS[0], i] for i in range(4)]
    expected = [generate(tiny_engine(model), prompt) for prompt in prompts]
    engine = tiny_engine(model, kv_disk_folder=str(tmp_path))
    completions = engine.generate(prompts, GREEDY)
    engine.close()
    assert [completion.token_ids for completion in completions] == expected
    assert all(completion.counts.num_cached == 60 for completion in completions)
    assert engine.state.num_blocks_restored == 15


def test_other_sequences_run_while_a_prefix_is_copied(model, tmp_path):
    engine = tiny_engine(model, kv_disk_folder=str(tmp_path))
    generate(engine, PROMPTS[0])
    engine.close()
    engine = tiny_engine(model, kv_disk_folder=str(tmp_path))
    may_read = engine._store._loader.submit(until, lambda: is_free)
    is_free = False
    engine.add("stored", PROMPTS[0], GREEDY)
    engine.add("new", PROMPTS[1], GREEDY)
    done = set()
    while "new" not in done:
        done |= {output.request_id for output in engine.step() if output.finish_reason}
    assert "stored" not in done
    is_free = True
    while engine.has_work:
        done |= {output.request_id for output in engine.step() if output.finish_reason}
    assert done == {"new", "stored"}
    assert may_read.done()
    engine.close()


def test_a_sequence_that_leaves_during_the_copy_leaves_no_block_in_use(model, tmp_path):
    engine = tiny_engine(model, kv_disk_folder=str(tmp_path))
    generate(engine, PROMPTS[0])
    engine.close()
    engine = tiny_engine(model, kv_disk_folder=str(tmp_path))
    engine.add("gone", PROMPTS[0], GREEDY)
    engine.step()
    engine.cancel("gone")
    until(lambda: engine.state.num_blocks_restored == 14)
    completion = engine.generate([PROMPTS[0]], GREEDY)[0]
    assert completion.counts.num_cached == 56
    assert engine.state.num_blocks_used == 0
    engine.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_disk_mb": 5}, "kv_disk_folder"),
        ({"kv_host_memory_mb": 1, "prefix_cache": False}, "prefix_cache"),
        ({"kv_host_memory_mb": 1, "block_size": 1024}, "kv_host_memory_mb"),
        ({"kv_disk_folder": "/proc/none"}, "kv_disk_folder"),
    ],
)
def test_settings_that_cannot_work_are_refused(model, options, named):
    with pytest.raises(LLMError, match=named):
        tiny_engine(model, num_blocks=2, **options)


@pytest.mark.parametrize(("num_blocks", "num_places", "expected"), [(100, 1000, 100), (100, 100, 50), (100, 10, 5)])
def test_what_is_in_the_cache_takes_half_of_the_places_at_most(num_blocks, num_places, expected):
    assert num_kept_ready(num_blocks, num_places) == expected


def test_blocks_are_saved_when_few_are_ready(model):
    engine = tiny_engine(model, num_blocks=2001, kv_host_memory_mb=1)  # places for 455 blocks
    for number, prompt in enumerate(PROMPTS):
        generate(engine, prompt)
        until(lambda: not engine._store._is_due() and not engine._store._is_saving)
        assert engine.state.num_blocks_saved == 0, number
    engine._pool.allocate(1700)  # of 2,000, and about 130 have content
    until(lambda: engine.state.num_blocks_saved > 0)
    engine.close()


def test_many_sequences_in_a_small_cache_get_the_same_tokens(model, tmp_path):
    rng = random.Random(3)
    beginnings = [prompt_of(seed, 40) for seed in range(6)]
    prompts = [[*rng.choice(beginnings), *prompt_of(seed, rng.randrange(1, 30))] for seed in range(40)]
    plain = tiny_engine(model, num_blocks=800)
    expected = [completion.token_ids for completion in plain.generate(prompts, GREEDY)]
    engine = tiny_engine(model, num_blocks=60, kv_host_memory_mb=1, kv_disk_folder=str(tmp_path), kv_disk_mb=1)
    for _ in range(3):
        assert [completion.token_ids for completion in engine.generate(prompts, GREEDY)] == expected
    engine.close()
    assert engine.state.num_blocks_restored > 0
    assert engine.state.num_blocks_used == 0
