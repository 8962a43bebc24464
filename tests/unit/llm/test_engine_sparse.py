"""Attention to the tokens that an indexer chooses: steps and engines find what transformers finds."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flambeau.llm.backends.cpu.backend import CpuBackend
from flambeau.llm.backends.cpu.network import unknown_parts
from flambeau.llm.backends.cuda import parts
from flambeau.llm.backends.eager import EagerBackend, PagedAttention, WholeAttention
from flambeau.llm.backends.inductor import compile_step, dummy_inputs
from flambeau.llm.calibration import calibrate_model
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.config import EngineConfig
from flambeau.llm.core import state_slots
from flambeau.llm.device_backends import make_backend
from flambeau.llm.errors import CheckpointError, InvalidRequest, LLMError
from flambeau.llm.executor.backend import CPU_KERNELS
from flambeau.llm.executor.kv_cache import KVCache, block_bytes
from flambeau.llm.executor.part_words import WORDS, part_words
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.proposers import check_head, tell_of_mtp
from flambeau.llm.quantize.int4 import scale_and_minimum
from flambeau.llm.quantize.quantizer import quantize
from flambeau.llm.quantize.settings import QuantizationSettings
from flambeau.llm.sampling_params import SamplingParams
from support.checkpoints import COMPRESSED_KINDS, SPARSE_KINDS, VOCAB_SIZE, YARN, config_of, write_checkpoint
from support.cpu_kernels import need_cpu_kernels
from support.llm_steps import keep_graphs, room, step_inputs
from support.tiny_models import tiny_engine

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def some_ids(length: int, seed: int = 7) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [
    some_ids(length, seed) for seed, length in enumerate((1, 40, 5, 23))
]  # shorter and longer than the 9 tokens that are chosen


@pytest.fixture(scope="module", params=[*SPARSE_KINDS, *COMPRESSED_KINDS])
def networks(request, tmp_path_factory):
    """One of ours, and the one of transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = write_checkpoint(folder, request.param)
    return load_model(folder), reference


def expected_logits(reference, ids):
    with torch.inference_mode():
        return reference(torch.tensor([ids])).logits[0].float()


def check_greedy(reference, prompts, completions):
    for prompt, one in zip(prompts, completions, strict=True):
        logits = expected_logits(reference, [*prompt, *one.token_ids])
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == one.token_ids


def test_logits_are_those_of_transformers(networks):
    model, reference = networks
    ids = some_ids(48)
    with torch.inference_mode():
        whole = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), WholeAttention()))
    torch.testing.assert_close(whole, expected_logits(reference, ids), **TOLERANCE)
    assert model.arch.unknown_keys == ()


def test_prompts_in_chunks_and_tokens_beside_others_have_the_logits_of_transformers(networks):
    model, reference = networks
    check_chunks(EagerBackend(model, used_room(model)), reference)


@pytest.mark.timeout(300)  # the kernels may have to be built
@pytest.mark.parametrize("networks", ["deepseek-v3.2", "glm-5"], indirect=True)
def test_kernels_compute_the_logits_of_transformers(networks):
    need_cpu_kernels()
    model, reference = copy.deepcopy(networks[0]), networks[1]
    backend = CpuBackend(model, used_room(model))
    assert backend.wait_until_compiled(timeout_s=250)
    assert backend.decode_path == CPU_KERNELS
    check_chunks(backend, reference)
    backend.close()


def used_room(model) -> KVCache:
    """A cache of sequences that have left."""
    cache = room(model, 2)
    for kept in (cache.index_keys, cache.entries, cache.index_entries):
        for keys in kept.values():
            keys.fill_(torch.nan)
    return cache


def check_chunks(backend, reference) -> None:
    has_states = bool(backend.model.arch.recurrence)
    ids = {i: some_ids(31, seed=i) for i in range(2)}
    found, done = {0: [], 1: []}, {0: 0, 1: 0}
    for lengths in ({0: 5}, {0: 1, 1: 19}, {0: 22, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 9}):
        step = {i: (done[i], ids[i][done[i] : done[i] + length]) for i, length in lengths.items()}
        is_decoding = set(lengths.values()) == {1} and len(lengths) == 2
        rows = torch.arange(sum(lengths.values()))
        logits = (
            backend.decode(step_inputs(step, query_len=1, has_states=has_states))
            if is_decoding
            else backend.prefill(step_inputs(step, has_states=has_states), rows)
        )
        for (i, length), part in zip(lengths.items(), logits.split([*lengths.values()]), strict=True):
            found[i].append(part)
            done[i] += length
    for i, pieces in found.items():
        torch.testing.assert_close(torch.cat(pieces), expected_logits(reference, ids[i])[: done[i]], **TOLERANCE)
    assert done == {0: 31, 1: 31}


def test_scores_of_many_tokens_are_computed_some_at_a_time(networks, monkeypatch):
    for module in ("sparse", "compressed"):
        monkeypatch.setattr(f"flambeau.llm.backends.{module}.NUMBERS_AT_ONCE", 16 * 31 * 4)
    test_prompts_in_chunks_and_tokens_beside_others_have_the_logits_of_transformers(networks)


def test_an_engine_generates_what_transformers_does(networks, monkeypatch):
    monkeypatch.setattr(state_slots, "MIN_SPARED_TOKENS", 8)
    model, reference = networks
    engine = tiny_engine(model, num_blocks=60, max_step_tokens=16, max_num_seqs=4)
    check_greedy(reference, PROMPTS, engine.generate(PROMPTS, GREEDY))
    turn = [*PROMPTS[1], *some_ids(9)]
    [again] = engine.generate([turn], GREEDY)
    assert again.counts.num_cached >= 36 or model.arch.recurrence  # the slots of states were all in use
    check_greedy(reference, [turn], [again])
    longer = [*turn, *again.token_ids, *some_ids(5)]
    [last] = engine.generate([longer], GREEDY)
    assert last.counts.num_cached >= len(turn) // 2
    check_greedy(reference, [longer], [last])


def test_preempted_sequences_and_proposed_tokens_change_nothing(networks):
    model, reference = networks
    engine = tiny_engine(model, num_blocks=28, max_num_seqs=4)
    prompts = [some_ids(20, seed) for seed in range(4)]
    check_greedy(reference, prompts, engine.generate(prompts, GREEDY))
    assert engine.state.num_preempted > 0
    engine = tiny_engine(model, speculation="lookup", max_num_seqs=4)
    repeated = [some_ids(7, seed) * 5 for seed in range(3)]
    check_greedy(reference, repeated, engine.generate(repeated, GREEDY))


def test_attention_to_compressed_entries_is_not_compiled_on_a_gpu(caplog):
    caplog.set_level("INFO")
    model = Transformer(from_hugging_face(config_of("deepseek-v4")))
    cache = SimpleNamespace(keys=[SimpleNamespace(device=torch.device("cuda"))])
    assert type(make_backend(model, cache, EngineConfig(compile=True))) is EagerBackend
    assert "attention to compressed entries is not compiled on a GPU" in caplog.text


@pytest.fixture
def traces(monkeypatch) -> list[Any]:
    return keep_graphs(monkeypatch)


LENGTHS = 28, 9, 17, 1, 23  # of sequences before a step
# With fewer rounds and layers, as a compiler traces each.
FEW_LAYERS = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "hc_sinkhorn_iters": 1,
}


@pytest.mark.parametrize("kind", ["glm-5", "minimax-m3", "mistral-large-4", "dots-3", "ax-k2", "qwen-4"])
def test_a_traced_step_chooses_from_any_number_of_tokens(kind, tmp_path, traces):
    """Traced with two blocks, fewer tokens than are chosen; run with up to eight."""
    write_checkpoint(tmp_path, kind)
    check_steps(load_model(tmp_path), {1: [2]})
    assert len(traces) == 1


def test_traced_steps_find_the_entries_of_any_number_of_sequences(tmp_path, traces):
    """And with proposed tokens."""
    write_checkpoint(tmp_path, "deepseek-v4", **FEW_LAYERS)
    check_steps(load_model(tmp_path), {1: [2], 3: [2]})
    assert len(traces) == 2


def check_steps(model, traced_with: dict[int, list[int]]) -> None:
    """Steps give what plain PyTorch gives, and leave it behind; traced once for one sequence, or for several."""
    states = {"has_states": bool(model.arch.recurrence)}
    ids = {i: some_ids(length, seed=i) for i, length in enumerate(LENGTHS)}
    plain, traced = (room(model, len(LENGTHS), rubbish=1.0) for _ in range(2))
    expected, found = (
        [*cache.tensors, *(x for layer in cache.states.layers.values() for x in layer)] for cache in (plain, traced)
    )
    eager = EagerBackend(model, plain)
    eager.prefill(step_inputs({i: (0, own) for i, own in ids.items()}, **states), torch.tensor([0]))
    for query_len, number in [(length, number) for length, numbers in traced_with.items() for number in numbers]:
        example = dummy_inputs(number, query_len, 2, torch.device("cpu"), **states)
        run = compile_step(model, traced, query_len, PagedAttention, example)
        for chosen in ([0, 1], [3, 1], [0, 1, 2], [4, 3, 2, 1, 0]) if number > 1 else ([0], [3]):
            step = step_inputs({i: (len(ids[i]), some_ids(query_len, seed=i)) for i in chosen}, query_len, **states)
            if states["has_states"] and query_len > 1:
                step.state_ends_T = step.state_slots_S.repeat_interleave(query_len)
            for one, other in zip(found, expected, strict=True):
                one.copy_(other)
            torch.testing.assert_close(run(step), eager.decode(step), **TOLERANCE)
            for one, other in zip(found, expected, strict=True):  # but for what is for padding
                torch.testing.assert_close(one[1:], other[1:], **TOLERANCE, equal_nan=True)


def test_traced_steps_of_an_engine_say_what_transformers_says(tmp_path, traces, monkeypatch):
    """Attention to compressed entries, with prefixes that are shared."""
    monkeypatch.setattr(state_slots, "MIN_SPARED_TOKENS", 8)
    reference = write_checkpoint(tmp_path, "deepseek-v4", **FEW_LAYERS)
    model = load_model(tmp_path)
    kind = partial(CpuBackend, steps_before_compiling=0)
    engine = tiny_engine(model, kind=kind, num_blocks=80, max_num_seqs=5)
    for asked in (PROMPTS, [[*PROMPTS[1], *some_ids(9)]], [*PROMPTS[::-1], some_ids(11, seed=5)]):
        check_greedy(reference, asked, engine.generate(asked, GREEDY))
        assert engine._backend.wait_until_compiled(timeout_s=100)
    assert engine._backend.decode_path == "Inductor"
    assert len(traces) == 2  # of one and of several sequences
    engine._backend.close()


def test_quantized_weights_and_caches_are_close(networks):
    model, reference = networks
    cache = room(model, 1, rubbish=1.0)
    states = bool(model.arch.recurrence)
    small = KVCache(model.arch, cache.num_blocks, cache.block_size, dtype=torch.bfloat16, num_slots=int(states))
    ids = some_ids(31)
    expected = expected_logits(reference, ids)
    found = EagerBackend(model, small).prefill(step_inputs({0: (0, ids)}, has_states=states), torch.arange(31))
    assert (found - expected)[:9].norm() < 0.05 * expected[:9].norm()  # later tokens may choose others
    index_keys = [*small.index_keys.values(), *small.index_entries.values()]
    assert {keys.dtype for keys in index_keys} == {torch.bfloat16}
    assert small.tensors[-1] is index_keys[-1]
    assert block_bytes(model.arch, 4, torch.bfloat16) == sum(t[0].numel() * 2 for t in small.tensors)


def test_kernels_of_a_gpu_leave_the_network_to_others_by_name(networks):
    model, _ = networks
    if model.arch.compression is not None:
        unknown = {"compression", "gate_limits", "hashed_layers", "hyper", "recurrence"}
        assert {*unknown_parts(model.arch)} >= unknown <= {*parts.unknown_parts(model.arch)}
        return
    has_others = model.arch.shapes or model.arch.hyper is not None or model.arch.joins_query_latents
    is_known = model.arch.latent_size and not model.arch.indexer.reads_inputs and not has_others
    assert bool(unknown_parts(model.arch)) != is_known
    assert "indexer" in parts.unknown_parts(model.arch)
    assert part_words(["indexer", "rotated_qk_norm", "late_qk_norm", "unnamed"]) == (
        "sparse attention, norms of queries and keys after the rotation, unnamed"
    )
    assert WORDS.keys() <= {field.name for field in fields(model.arch)}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", ["linear_attention"] * 3 + ["sliding_attention"]),
        ("hc_count", 1),
        ("indexer_kv_heads", 2),
        ("indexer_budget", 7),
        ("indexer_head_dim", 6),
        ("ple_layer_ids", [3]),
        ("ple_embed_dim", 26),
        ("output_gate_type", "gelu"),
    ],
)
def test_settings_of_qwen_4_that_are_not_supported_are_refused_by_name(key, value):
    with pytest.raises(CheckpointError, match=key):
        from_hugging_face({**config_of("qwen-4"), key: value})


def test_what_gives_weights_to_heads_is_not_quantized(tmp_path):
    write_checkpoint(tmp_path, "deepseek-v3.2")
    model = quantize(load_model(tmp_path, dtype=torch.bfloat16), "int8")
    indexer = model.model.layers[0].self_attn.indexer
    assert indexer.weights_proj.weight.dtype == torch.float32
    assert type(indexer.wq_b).__name__ == "Int8Linear"
    backend = CpuBackend(model, room(model, 1, dtype=torch.bfloat16))
    ids = some_ids(20)
    with torch.inference_mode():
        assert backend.prefill(step_inputs({0: (0, ids)}), torch.tensor([19])).isfinite().all()
    backend.close()


def test_layers_that_depend_on_others_are_not_calibrated_one_by_one(networks):
    model, _ = networks
    if model.arch.hyper is not None or model.arch.indexer.reusing_layers:
        with pytest.raises(InvalidRequest, match="read more than hidden states"):
            calibrate_model(model, some_ids(8), QuantizationSettings(kind="int4"), scale_and_minimum)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("deepseek-v3.2", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek-v3.2", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("deepseek-v3.2", {"index_head_dim": 6}, "index_head_dim"),
        ("deepseek-v3.2", {"scoring_func": "softmax"}, "scoring_func"),
        ("mistral-large-4", {"kv_source_layers": [0, 1, 2, 2, 4]}, "layers 2 and 3 must both be rotated"),
        ("mistral-large-4", {"kv_source_layers": [0, 0, 2, 1, 4]}, "kv_source_layers"),
        (
            "mistral-large-4",
            {"no_rope_layers": [1] * 5, "kv_source_layers": [0, 1, 1, 0, 4]},
            "the last layer before it",
        ),
        ("mistral-large-4", {"n_group": 2}, "n_group"),
        ("mistral-large-4", {"index_head_dim": 4}, "index_head_dim"),
        ("glm-5", {"indexer_types": ["shared", "full", "full", "full"]}, "first layer"),
        ("glm-5", {"indexer_types": ["full"]}, "indexer_types"),
        ("glm-5", {"indexer_types": None, "index_topk_pattern": "FXFF"}, "indexer_types"),
        ("glm-5", {"index_topk": 0}, "0 tokens or blocks to choose"),
        ("minimax-m3", {"index_block_size": 0}, "index_block_size"),
        ("deepseek-v4", {"index_topk": 0}, "index_topk"),
        ("hy-4", {"swiglu_limit": 0.0}, "swiglu_limit"),
        ("glm-5.3", {"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail"),
        ("glm-5.3", {"indexer_types": ["full", "shared", "full", "full"]}, "indexer of its own"),
        ("glm-5.3", {"index_kpool": 3}, "index_kpool"),
        ("deepseek-v4", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("deepseek-v4", {"layer_types": None, "compress_ratios": [0, 4, 128, 16]}, "compress_ratios"),
        ("deepseek-v4", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek-v4", {"o_groups": 3}, "o_groups"),
    ],
)
def test_other_settings_are_refused_by_name(kind, changes, message):
    config = config_of(kind)
    text = config.get("text_config", {})
    given = {**config, "text_config": {**text, **changes}} if text else {**config, **changes}
    with pytest.raises(CheckpointError, match=message):
        from_hugging_face(given)


def test_blocks_that_no_entry_fits_are_refused():
    arch = from_hugging_face(config_of("deepseek-v4"))
    with pytest.raises(LLMError, match="multiple of 8"):
        block_bytes(arch, 6, torch.float32)


def test_a_layer_for_further_tokens_is_left_out_with_a_warning(tmp_path, caplog):
    write_checkpoint(tmp_path, "deepseek-v4")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "mtp.0.h_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    tell_of_mtp(tmp_path, model.arch)
    assert "layer of multi-token prediction, which is left out" in caplog.text
    with pytest.raises(LLMError, match="3 streams"):
        check_head(EngineConfig(speculation="mtp"), model.arch)


def test_published_settings_of_deepseek_v4():
    """Layers are named by the tokens of an entry, and positions in the way of older files."""
    new = config_of("deepseek-v4")
    own = ("layer_types", "mlp_layer_types", "rope_parameters", "partial_rotary_factor", "compress_rates")
    old = {key: value for key, value in new.items() if key not in own}
    old |= {"compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 1, "qk_rope_head_dim": 8, "expert_dtype": "fp4"}
    scaling = {"type": "yarn", "factor": 4.0, **YARN}
    found, named = from_hugging_face({**old, "rope_scaling": scaling}), from_hugging_face(new)
    assert found.unknown_keys == named.unknown_keys == ()
    assert (found.compression.rates, found.hashed_layers) == ((0, 4, 128, 4), {0})
    for key in ("rotary_size", "rope_theta", "local_rope_theta", "rope_scaling", "windows", "recurrence", "hyper"):
        assert getattr(found, key) == getattr(named, key), key
    assert found.rope_scaling.attention_factor == 1.0
    assert (found.rope_theta, found.local_rope_theta) == (160000.0, 10000.0)


def test_published_settings_of_glm_5():
    """Layers that share a choice are named by a pattern or a frequency, as transformers reads them."""
    from transformers import GlmMoeDsaConfig

    config = {key: value for key, value in config_of("glm-5").items() if key != "indexer_types"}
    rng = random.Random(3)
    cases = [{"index_topk_freq": rng.randint(1, 5), "index_skip_topk_offset": rng.randint(1, 4)} for _ in range(6)]
    for changes in ({}, {"index_topk_pattern": "FSSF"}, *cases):
        given = json.loads(json.dumps({**config, **changes}))
        expected = GlmMoeDsaConfig(**{**given, "architectures": None}).indexer_types
        found = from_hugging_face(given).indexer.reusing_layers
        assert [("shared" if i in found else "full") for i in range(4)] == expected
    assert not from_hugging_face({**config, "indexer_rope_interleave": False}).indexer.paired_rope
