"""Adapters in an engine: named by requests, mixed, with their own prefix caches, on ranks, merged and unloaded."""

from __future__ import annotations

import json

import pytest
import torch

from flambeau.llm.errors import CheckpointError, InvalidRequest, LLMError
from flambeau.llm.loader import load_engine
from flambeau.llm.sampling_params import SamplingParams
from support.adapters import layer_shapes, merge, read_peft_adapter, write_adapter, write_peft_adapter
from support.checkpoints import read_checkpoint
from support.language_models import write_language_model
from support.ranks import run_ranks

DORA = ["q_proj", "o_proj", "up_proj", "down_proj"]
PROMPTS = [[3, 10, 20, 30, 40, 50, 60, 70, 80, 90], [5, 6, 7]]
LENGTH = 30
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
OPTIONS = {"device": "cpu", "block_size": 4, "num_blocks": 200, "compile": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint and three adapters of it; the last changes more than linear layers."""
    folder = write_language_model(tmp_path_factory.mktemp("model"))
    shapes = layer_shapes(folder)
    more = {"target_modules": ["q_proj", "down_proj", "lm_head"], "lora_bias": True}
    whole = ["norm", "v_proj", "embed_tokens"]
    return folder, {
        "one": str(write_adapter(folder.parent / "one", shapes, rank=4, seed=1)),
        "two": str(write_adapter(folder.parent / "two", shapes, rank=8, alpha=4, seed=2)),
        "many": str(write_peft_adapter(folder, folder.parent / "many", modules_to_save=whole, **more)),
    }


@pytest.fixture(scope="module")
def expected(checkpoint) -> dict[str, list[list[int]]]:
    """The greedy tokens of transformers: without an adapter, and with each of them in the weights."""
    folder, adapters = checkpoint
    networks = {"": read_checkpoint(folder)}
    networks |= {name: merge(read_checkpoint(folder), folder.parent / name) for name in ("one", "two")}
    networks["many"] = read_peft_adapter(folder, adapters["many"])
    return {name: [greedy_tokens(network, prompt) for prompt in PROMPTS] for name, network in networks.items()}


def greedy_tokens(network, prompt: list[int]) -> list[int]:
    ids = [*prompt]
    with torch.inference_mode():
        for _ in range(LENGTH):
            ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture
def engine(checkpoint):
    folder, adapters = checkpoint
    engine = load_engine(folder, lora_adapters=adapters, **OPTIONS)
    yield engine
    engine.close()


def tokens_of(engine, adapter: str = "") -> list[list[int]]:
    return [completion.token_ids for completion in engine.generate(PROMPTS, GREEDY, adapter=adapter)]


def run(engine) -> dict[str, list[int]]:
    """Run all requests to their end."""
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


def test_greedy_tokens_are_those_of_merged_weights(engine, expected):
    assert len({json.dumps(tokens) for tokens in expected.values()}) == 4
    assert {name: tokens_of(engine, name) for name in ("", "one", "two", "many")} == expected


def test_requests_of_all_adapters_run_in_one_batch(engine, expected):
    for name in expected:
        for i, prompt in enumerate(PROMPTS):
            engine.add(f"{name}/{i}", prompt, GREEDY, adapter=name)
    assert run(engine) == {f"{name}/{i}": expected[name][i] for name in expected for i in range(len(PROMPTS))}


@pytest.mark.parametrize("options", [{"speculation": "lookup"}, {"quantization": "int8"}, {"compile": True}])
@pytest.mark.parametrize("name", ["two", "many"])
def test_adapters_work_with_other_features(checkpoint, expected, options, name):
    folder, adapters = checkpoint
    engine = load_engine(folder, lora_adapters=adapters, **{**OPTIONS, **options})
    merged = load_engine(
        folder, lora_adapters={name: adapters[name]}, merge_lora=True, **{**OPTIONS, **options, "quantization": None}
    )
    engine.wait_until_compiled()
    assert tokens_of(merged) == expected[name]
    found = tokens_of(engine, name)
    if "quantization" not in options:  # else the weights themselves are others
        assert found == expected[name]
    assert found != tokens_of(engine)
    engine.close()
    merged.close()


def test_a_draft_model_proposes_without_adapters(checkpoint, expected):
    folder, adapters = checkpoint
    engine = load_engine(folder, lora_adapters=adapters, draft=str(folder), **OPTIONS)
    assert {name: tokens_of(engine, name) for name in ("", "one", "two", "many")} == expected
    engine.close()


def test_every_adapter_has_its_own_prefix_cache(engine, expected):
    def cached(adapter):
        [completion] = engine.generate([PROMPTS[0]], GREEDY, adapter=adapter)
        assert completion.token_ids == expected[adapter][0]
        return completion.counts.num_cached

    assert [cached(name) for name in expected] == [0] * 4
    assert [cached(name) for name in expected] == [8] * 4


def test_an_adapter_loaded_again_does_not_find_the_old_prefixes(engine, checkpoint, expected):
    tokens_of(engine, "one")
    engine.unload_adapter("one")
    engine.load_adapter("one", checkpoint[1]["two"])
    assert tokens_of(engine, "one") == expected["two"]


def test_stored_prefixes_of_adapters_are_kept_apart(checkpoint, expected, tmp_path):
    folder, adapters = checkpoint
    tokens = {}
    for _ in range(2):  # the second engine finds what the first has stored
        engine = load_engine(folder, lora_adapters=adapters, kv_disk_folder=str(tmp_path), **OPTIONS)
        try:
            for name in ("", "one", "two"):
                completion = engine.generate([PROMPTS[0]], GREEDY, adapter=name)[0]
                tokens.setdefault(name, []).append((completion.token_ids, completion.counts.num_cached))
        finally:
            engine.close()
    assert tokens == {name: [(expected[name][0], 0), (expected[name][0], 8)] for name in tokens}


def test_an_unloaded_adapter_finishes_its_requests_and_is_freed(engine, expected):
    engine.add("last", PROMPTS[0], GREEDY, adapter="one")
    engine.step()
    engine.unload_adapter("one")
    assert engine.adapters == ["two", "many"]
    with pytest.raises(InvalidRequest, match="there is two, many"):
        engine.add("late", PROMPTS[0], GREEDY, adapter="one")
    store = engine._adapters._adapters
    assert len(store.adapters) == 3
    assert run(engine)["last"] == expected["one"][0][1:]
    assert len(store.adapters) == 2


def test_nothing_is_left_of_adapters_that_come_and_go(checkpoint, expected):
    """The name is used for others again, whose prefixes are their own."""
    folder, adapters = checkpoint
    engine = load_engine(folder, kv_host_memory_mb=4, **OPTIONS)
    keys = set()
    for name in ("one", "two", "one"):
        engine.load_adapter("poet", adapters[name])
        assert tokens_of(engine, "poet") == expected[name]
        engine.unload_adapter("poet")
        keys |= engine._pool._keys.keys()
    assert min(keys) == 0  # the roots of adapters are negative
    assert not engine._adapters._adapters.adapters
    engine.close()


def test_names_are_checked(engine, checkpoint):
    with pytest.raises(LLMError, match="already"):
        engine.load_adapter("one", checkpoint[1]["one"])
    with pytest.raises(InvalidRequest, match="no adapter 'three'"):
        engine.unload_adapter("three")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        engine.load_adapter("three", checkpoint[0])
    assert engine.adapters == ["one", "two", "many"]


def test_only_one_adapter_can_be_merged(checkpoint):
    folder, adapters = checkpoint
    with pytest.raises(LLMError, match="exactly one"):
        load_engine(folder, lora_adapters=adapters, merge_lora=True, **OPTIONS)
    engine = load_engine(folder, lora_adapters={"one": adapters["one"]}, merge_lora=True, **OPTIONS)
    assert tokens_of(engine, "one") == tokens_of(engine)
    with pytest.raises(LLMError, match="merge_lora"):
        engine.load_adapter("two", adapters["two"])
    with pytest.raises(LLMError, match="merged"):
        engine.unload_adapter("one")
    engine.close()


RANK = """
import json, os, sys
import torch
from pathlib import Path
from flambeau.llm.errors import LLMError
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.loader import load_engine, load_follower

torch.set_num_threads(1)
folder, size, (adapters, prompts, length, compile) = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
options = {"tensor_parallel_size": size, "num_blocks": 60, "block_size": 4, "compile": compile, "device": "cpu"}
options["lora_adapters"] = {name: adapters[name] for name in ("one", "many")}
if os.environ["RANK"] != "0":
    load_follower(folder, **options)()
else:
    engine = load_engine(folder, **options)
    engine.load_adapter("two", adapters["two"])  # while the ranks run
    engine.load_adapter("dora", adapters["dora"])
    try:
        engine.load_adapter("none", str(folder))
    except LLMError as error:
        assert "adapter_config.json" in str(error), error
    else:
        raise AssertionError
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    names = ("", "one", "two", "many", "dora")
    found = {name: [c.token_ids for c in engine.generate(prompts, params, adapter=name)] for name in names}
    engine.unload_adapter("one")
    assert engine.generate(prompts[:1], params, adapter="two")[0].token_ids == found["two"][0]
    print(json.dumps(found))
    engine.close()
"""


@pytest.mark.parametrize("compile", [False, True])
def test_two_ranks_share_adapters(checkpoint, expected, compile, tmp_path):
    folder, adapters = checkpoint
    dora = write_peft_adapter(folder, tmp_path / "dora", target_modules=DORA, use_dora=True)
    adapters = {**adapters, "dora": str(dora)}
    network = read_peft_adapter(folder, dora)
    expected = {**expected, "dora": [greedy_tokens(network, prompt) for prompt in PROMPTS]}
    assert run_ranks(folder, 2, RANK, [adapters, PROMPTS, LENGTH, compile]) == [expected]
