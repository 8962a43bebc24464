"""The network finds what transformers finds, for every family: without a cache, from the cache, and token by token."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flambeau.llm.backends.eager import PagedAttention, WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.transformer import Transformer
from support.checkpoints import KINDS, LENGTH, VOCAB_SIZE, read_checkpoint, write_checkpoint

BLOCK_SIZE, NUM_BLOCKS = 8, 8
TOLERANCE = {"atol": 5e-5, "rtol": 0.0}  # of logits up to 8


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], tuple[Transformer, Any]]:
    """A kind's network, loaded from the folder transformers wrote, and the one of transformers."""
    made: dict[str, tuple[Transformer, Any]] = {}

    def make(kind: str) -> tuple[Transformer, Any]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            reference = write_checkpoint(folder, kind)
            made[kind] = load_model(folder), reference
        return made[kind]

    return make


def some_ids(length: int = LENGTH) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(7)).tolist()


def reference_logits(reference: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([ids])).logits[0].float()


def cache_for(model: Transformer) -> KVCache:
    cache = KVCache(model.arch, 1 + NUM_BLOCKS, BLOCK_SIZE)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(50.0)  # rubbish that nobody may look at
    return cache


def step(
    model: Transformer, cache: KVCache, num_cached: int, ids: list[int], query_len: int = 0, forward: Any = None
) -> Tensor:
    """The logits of the next tokens of one sequence, whose blocks lie in memory from back to front."""
    end = num_cached + len(ids)
    blocks = list(range(NUM_BLOCKS, 0, -1))
    places = range(num_cached, end)
    inputs = StepInputs(
        ids_T=torch.tensor(ids),
        positions_T=torch.tensor(places),
        slots_T=torch.tensor([blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in places]),
        query_starts=torch.tensor([0, len(ids)]),
        context_lens_S=torch.tensor([end]),
        block_tables_SB=torch.tensor([blocks[: -(-end // BLOCK_SIZE)]]),
        query_len=query_len,
    )
    with torch.no_grad():
        return model.logits(
            (model if forward is None else forward)(inputs.ids_T, inputs.positions_T, PagedAttention(cache, inputs))
        )


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(checkpoint, kind):
    model, reference = checkpoint(kind)
    ids = some_ids()
    expected = reference_logits(reference, ids)
    with torch.inference_mode():
        whole = model.logits(model(torch.tensor(ids), torch.arange(LENGTH), WholeAttention()))
    torch.testing.assert_close(whole, expected, **TOLERANCE)
    cache = cache_for(model)
    chunks = [step(model, cache, start, ids[start : start + 20]) for start in range(0, LENGTH, 20)]
    torch.testing.assert_close(torch.cat(chunks), expected, **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(checkpoint, kind):
    model, reference = checkpoint(kind)
    ids = some_ids(20)
    cache = cache_for(model)
    found = [step(model, cache, 0, ids)]
    for _ in range(30):
        ids.append(int(found[-1][-1].argmax()))
        found.append(step(model, cache, len(ids) - 1, ids[-1:], query_len=1))
    expected = reference_logits(reference, ids)  # each row says what follows the tokens before it
    assert expected[19:-1].argmax(-1).tolist() == ids[20:]
    torch.testing.assert_close(torch.cat(found), expected, **TOLERANCE)


def test_the_kinds_differ_where_they_should(checkpoint):
    """A window, a stretched position or a missing rotation that changed nothing would prove nothing."""
    arch = {kind: checkpoint(kind)[0].arch for kind in ("mistral", "qwen-2-windows", "qwen-3-windows", "smol-lm-3")}
    assert arch["mistral"].windows == (9, 9)
    assert arch["qwen-2-windows"].windows == (None, 9)
    assert arch["qwen-3-windows"].windows == (7, None)
    assert arch["smol-lm-3"].unrotated_layers == {1}
    assert checkpoint("qwen-3-moe")[0].arch.dense_layers == {0, 2, 3}
    assert checkpoint("qwen-2.5-yarn")[0].arch.rope_scaling.kind == "yarn"


def test_a_batch_of_whole_sequences_is_computed_as_one(checkpoint):
    model, reference = checkpoint("qwen-3")
    ids = torch.tensor([some_ids()[:12], some_ids()[12:24]])
    with torch.inference_mode():
        found = model.logits(model(ids, torch.arange(12).expand(2, 12), WholeAttention()))
        torch.testing.assert_close(found, reference(ids).logits, **TOLERANCE)


def test_a_sharded_checkpoint_of_transformers_in_bfloat16_is_loaded_in_its_own_type(tmp_path):
    write_checkpoint(tmp_path, "llama-3.1", dtype=torch.bfloat16, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = load_model(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    found = load_model(tmp_path, dtype=torch.float32)
    ids = some_ids()
    expected = reference_logits(read_checkpoint(tmp_path), ids)
    with torch.inference_mode():
        logits = found.logits(found(torch.tensor(ids), torch.arange(LENGTH), WholeAttention()))
    torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_the_older_spelling_of_rotary_parameters_gives_the_same_logits(checkpoint, tmp_path):
    model, _ = checkpoint("llama-3.1")
    write_checkpoint(tmp_path, "llama-3.1")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    path.write_text(json.dumps({**config, "rope_scaling": scaling, "torch_dtype": "float32"}))
    older = load_model(tmp_path)
    assert older.arch == model.arch
    ids = torch.tensor(some_ids())
    found, expected = (m(ids, torch.arange(LENGTH), WholeAttention()) for m in (older, model))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["llama-3.1", "qwen-3", "mixtral"])
def test_a_step_of_even_length_is_traced_without_a_break(checkpoint, kind):
    model, _ = checkpoint(kind)
    ids, cache = some_ids(20), cache_for(model)
    step(model, cache, 0, ids)
    expected = step(model, cache, 20, [5], query_len=1)
    torch._dynamo.reset()
    traced = torch.compile(model, backend="eager", fullgraph=True)
    found = step(model, cache, 20, [5], query_len=1, forward=traced)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
