"""Adapters compute what the same network computes with them in its weights."""

from __future__ import annotations

import gc
import json
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flambeau.llm.adapters.adapter_store import AdapterStore, with_adapters
from flambeau.llm.adapters.lora_weights import AdapterTarget, read_adapter
from flambeau.llm.adapters.merge import MergeOnLoad
from flambeau.llm.backends.cpu.attention import choose_attention
from flambeau.llm.backends.cpu.backend import CpuBackend
from flambeau.llm.backends.cpu.network import can_compute
from flambeau.llm.backends.cpu.packed_linear import PackedLinear, pack_layers
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.errors import CheckpointError
from flambeau.llm.executor.shard import Shard, local_architecture
from flambeau.llm.models.embeddings import NarrowEmbedding
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.packed_layers import use_fast_layers
from flambeau.llm.quantize.quantizer import quantize
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear
from support.adapters import PROJECTIONS, layer_shapes, merge, write_adapter, write_peft_adapter
from support.checkpoints import read_checkpoint, write_checkpoint
from support.cpu_kernels import need_cpu_kernels
from support.llm_steps import room, step_inputs
from support.ranks import run_as_threads
from support.sharded import load_part

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
CPU = torch.device("cpu")
WEIGHTS = "adapter_model.safetensors"
NAMES = {  # of layers in families that have others
    "phi-3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt-2": ("c_attn", "c_fc", "c_proj"),
    "gpt-neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "phi-2": ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
    "bloom": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "gpt-j": ("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"),
    "minicpm-3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "deepseek-v2-lite": ("q_proj", "kv_a_proj_with_mqa", "o_proj"),
    "glm": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"),
}
KINDS = ("llama-3", "llama-biased", "qwen-3", "gemma-2", "cohere", *NAMES)
PROMPTS = [[5, 9, 40, 41], [7] * 9, [1, 2, 3], [88, 3]]


def shapes_of(folder, kind):
    """Outputs and inputs; GPT-2 stores its weights transposed."""
    shapes = layer_shapes(folder, NAMES.get(kind, PROJECTIONS))
    return {name: shape[::-1] if kind == "gpt-2" else shape for name, shape in shapes.items()}


def target_of(model) -> AdapterTarget:
    cpu = torch.device("cpu")
    return AdapterTarget(arch=model.arch, local=model.arch, shard=None, device=cpu, dtype=torch.float32)


def store_of(model, *folders) -> AdapterStore:
    """A store with these adapters, numbered from 1."""
    store = AdapterStore(target_of(model), model)
    for number, folder in enumerate(folders, 1):
        store.load(number, folder)
    return store


def with_numbers(inputs, numbers):
    """The inputs of a step whose sequences have these adapters."""
    lengths = inputs.query_starts.diff()
    inputs.adapters_T = torch.tensor(numbers).repeat_interleave(lengths)
    return inputs


def prompt_logits(backend, numbers) -> list[torch.Tensor]:
    """All logits of each prompt, computed together."""
    inputs = with_numbers(step_inputs(dict(enumerate((0, prompt) for prompt in PROMPTS))), numbers)
    logits = backend.prefill(inputs, torch.arange(len(inputs.ids_T)))
    return [*logits.split([len(prompt) for prompt in PROMPTS])]


def decode_logits(backend, numbers) -> torch.Tensor:
    """The logits after one more token of each prompt."""
    tokens = {i: (len(prompt), [11 + i]) for i, prompt in enumerate(PROMPTS)}
    return backend.decode(with_numbers(step_inputs(tokens, query_len=1), numbers))


def expected_logits(reference, ids) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([ids])).logits[0].float()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A checkpoint, two adapters of different ranks, and transformers' networks without, with the one, the other."""
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder, "mistral-v0.3")  # its head size has CPU kernels
    shapes = layer_shapes(folder)
    first = write_adapter(folder / "first", shapes, rank=4, seed=1)
    second = write_adapter(folder / "second", shapes, rank=19, alpha=24, seed=2, use_rslora=True)
    references = [read_checkpoint(folder), *(merge(read_checkpoint(folder), adapter) for adapter in (first, second))]
    return folder, [first, second], references


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_computes_what_merged_weights_compute(tmp_path, kind):
    write_checkpoint(tmp_path, kind)
    adapter = write_adapter(tmp_path / "adapter", shapes_of(tmp_path, kind))
    model = load_model(tmp_path)
    plain, reference = read_checkpoint(tmp_path), merge(read_checkpoint(tmp_path), adapter)
    store = store_of(model, adapter)
    backends = [EagerBackend(model, room(model, len(PROMPTS)), adapters=store)]
    if can_compute(model, room(model, 1)):
        backends.append(make_backend("CPU kernels", load_model(tmp_path), store))
    for backend in backends:
        found = prompt_logits(backend, [1, 0, 1, 0])
        for i, prompt in enumerate(PROMPTS):
            torch.testing.assert_close(found[i], expected_logits((plain, reference)[(i + 1) % 2], prompt), **TOLERANCE)


def make_backend(path, model, store):
    cache = room(model, len(PROMPTS))
    if path == "plain PyTorch":
        return EagerBackend(model, cache, choose_attention, adapters=store)
    backend = CpuBackend(model, cache, adapters=store)
    backend.wait_until_compiled()
    assert backend.decode_path == "CPU kernels"
    return backend


FILE_NAMES = {  # of layers where files have names of their own, and experts lie one by one
    "longcat": ("q_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "mistral-large-4": ("wq", "wkv_a_with_mqa", "wo", "w1", "w2", "w3"),
}


@pytest.mark.parametrize("kind", FILE_NAMES)
def test_adapters_by_the_names_of_files_compute_what_changed_files_compute(tmp_path, kind, monkeypatch):
    """On one rank, on two, and merged."""
    write_checkpoint(tmp_path / "plain", kind)
    shapes = {
        name: shape
        for name, shape in layer_shapes(tmp_path / "plain", FILE_NAMES[kind]).items()
        if "vision" not in name and not re.search(r"experts\.[678]\.", name)  # without weights
    }
    adapter = write_adapter(tmp_path / "adapter", shapes)
    shutil.copytree(tmp_path / "plain", tmp_path / "changed")
    tensors, pairs = (load_file(path) for path in (tmp_path / "plain/model.safetensors", adapter / WEIGHTS))
    for name in shapes:
        a_RI, b_OR = (pairs[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
        tensors[f"{name}.weight"] += b_OR @ a_RI * 2
    save_file(tensors, tmp_path / "changed/model.safetensors")
    expected = all_logits(load_model(tmp_path / "changed"))
    assert (all_logits(load_model(tmp_path / "plain")) - expected).abs().max() > 0.5

    model = load_model(tmp_path / "plain")
    target = AdapterTarget(arch=model.arch, local=model.arch, shard=None, device=CPU, dtype=torch.float32)
    merging = MergeOnLoad(adapter, target, None)
    merged = load_model(tmp_path / "plain", arrived=merging)
    merging.finish(merged)
    torch.testing.assert_close(all_logits(merged), expected, **TOLERANCE)
    torch.testing.assert_close(all_logits(model, adapter), expected, **TOLERANCE)

    parts = [load_part(tmp_path / "plain", rank) for rank in range(2)]
    for found in run_as_threads(monkeypatch, lambda rank: all_logits(parts[rank], adapter, Shard(model.arch, rank, 2))):
        torch.testing.assert_close(found, expected, **TOLERANCE)


def all_logits(model: Transformer, adapter: Path | None = None, shard: Shard | None = None) -> torch.Tensor:
    """Of all prompts, with an adapter or without."""
    arch = model.arch if shard is None else shard.arch
    store = AdapterStore(
        AdapterTarget(arch=arch, local=model.arch, shard=shard, device=CPU, dtype=torch.float32), model
    )
    if adapter is not None:
        store.load(1, adapter)
    inputs = step_inputs({i: (0, prompt) for i, prompt in enumerate(PROMPTS)})
    inputs.adapters_T = torch.full_like(inputs.ids_T, int(adapter is not None))
    backend = EagerBackend(model, room(model, len(PROMPTS)), adapters=store)
    return backend.prefill(inputs, torch.arange(len(inputs.ids_T)))


def test_stacked_experts_beside_experts_without_weights_are_refused(tmp_path):
    """A stack may have places for these, which nothing tells."""
    write_checkpoint(tmp_path, "longcat")
    adapter = write_adapter(tmp_path / "adapter", {"model.layers.0.mlp.experts": (64, 32)}, rank=36)
    with pytest.raises(CheckpointError, match=r"changes what cannot be changed here: model.layers.0.mlp.experts"):
        all_logits(load_model(tmp_path), adapter)


@pytest.mark.parametrize("path", ["plain PyTorch", "CPU kernels"])
def test_adapters_are_mixed_in_one_batch(llama, path):
    folder, adapters, references = llama
    model = load_model(folder)
    backend = make_backend(path, model, store_of(model, *adapters))
    numbers = [2, 0, 1, 2]
    found = prompt_logits(backend, numbers)
    after = decode_logits(backend, numbers)
    for i, prompt in enumerate(PROMPTS):
        expected = expected_logits(references[numbers[i]], [*prompt, 11 + i])
        torch.testing.assert_close(torch.cat([found[i], after[i : i + 1]]), expected, **TOLERANCE)
    tokens = {i: (len(prompt), [11 + i]) for i, prompt in enumerate(PROMPTS)}
    if backend.greedy is not None:
        assert torch.equal(
            backend.greedy.argmax(with_numbers(step_inputs(tokens, query_len=1), numbers)), after.argmax(-1)
        )


def test_a_row_has_the_same_bits_in_any_batch(llama):
    folder, adapters, _ = llama
    model = load_model(folder)
    backend = make_backend("CPU kernels", model, store_of(model, *adapters))
    together = prompt_logits(backend, [1, 1, 1, 1])
    mixed = prompt_logits(backend, [1, 2, 0, 1])
    assert torch.equal(together[0], mixed[0])
    assert torch.equal(together[3], mixed[3])


def test_layers_that_were_packed_are_not_kept_for_adapters(llama):
    folder, adapters, _ = llama
    model = load_model(folder)
    layer = weakref.ref(model.model.layers[0].mlp.down_proj)
    make_backend("CPU kernels", model, store_of(model, *adapters))
    gc.collect()
    assert layer() is None


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_adapters_are_added_to_quantized_layers(llama, kind):
    folder, adapters, _ = llama
    plain = quantize(load_model(folder), kind)
    merged = quantize(load_model(folder), kind)  # the adapter is added to what the quantized weights stand for
    store = store_of(plain, *adapters)
    for name, change in store.adapters[2].layers.items():
        layer = merged.get_submodule(name)
        linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
        is_quantized = hasattr(layer, "dequantize")
        linear.weight.data = layer.dequantize(torch.float32) if is_quantized else layer.weight.clone()
        for part in change.parts:
            linear.weight.data[part.columns] += part.b_OR @ part.a_RI
        merged.set_submodule(name, linear)
    expected = prompt_logits(EagerBackend(merged, room(merged, len(PROMPTS))), [0] * 4)
    found = prompt_logits(EagerBackend(plain, room(plain, len(PROMPTS)), adapters=store), [2] * 4)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)
    use_fast_layers(plain, torch.float32)  # these round to bfloat16
    fast = prompt_logits(EagerBackend(plain, room(plain, len(PROMPTS)), adapters=store), [2] * 4)
    assert (torch.cat(fast) - torch.cat(expected)).norm() < 0.05 * torch.cat(expected).norm()


def test_ranks_have_parts_of_an_adapter_that_add_up_to_it(llama):
    folder, adapters, _ = llama
    arch = load_model(folder).arch
    whole = store_of(load_model(folder), adapters[0]).adapters[1]
    local = local_architecture(arch, 2)
    cpu = torch.device("cpu")
    halves = []
    for rank in range(2):
        shard = Shard(arch, rank, 2)
        target = AdapterTarget(arch=arch, local=local, shard=shard, device=cpu, dtype=torch.float32)
        store = AdapterStore(target, load_model(folder, build=lambda _: Transformer(local), shard=shard))
        store.load(1, adapters[0])
        halves.append(store.adapters[1])
    layer = "model.layers.1.self_attn.o_proj"
    inputs = torch.cat([half.layers[layer].parts[0].a_RI for half in halves], dim=1)
    torch.testing.assert_close(inputs, whole.layers[layer].parts[0].a_RI)
    layer = "model.layers.1.self_attn.qkv_proj"
    for i in range(3):
        outputs = torch.cat([half.layers[layer].parts[i].b_OR for half in halves])
        torch.testing.assert_close(outputs, whole.layers[layer].parts[i].b_OR)


def test_adapters_are_those_of_peft(llama):
    peft = pytest.importorskip("peft")
    folder, adapters, _ = llama
    model = load_model(folder)
    backend = make_backend("CPU kernels", model, store_of(model, *adapters))
    for number, adapter in enumerate(adapters, 1):
        reference = peft.PeftModel.from_pretrained(read_checkpoint(folder), adapter)
        found = prompt_logits(backend, [number] * 4)
        for i, prompt in enumerate(PROMPTS):
            torch.testing.assert_close(found[i], expected_logits(reference, prompt), **TOLERANCE)


# ---- what is refused ----


def changed(folder, **config):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return folder


@pytest.fixture
def small(tmp_path, llama):
    """A checkpoint's network, and an adapter of it that a test may spoil."""
    folder, _, _ = llama
    return load_model(folder), write_adapter(tmp_path / "adapter", layer_shapes(folder))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "some"}, "bias"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"peft_type": "VERA"}, "VERA"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"alora_invocation_tokens": [4, 5]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"trainable_token_indices": ["one"]}, "trainable_token_indices"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a finite number"),
        ({"lora_alpha": float("nan")}, "it has NaN, which is no number"),
        ({"lora_alpha": 1e300}, "too large for float32; lora_alpha is likely wrong"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "finite number"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"spectral_gain": 3}, "spectral_gain"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(small, config, name):
    model, folder = small
    with pytest.raises(CheckpointError, match=name):
        store_of(model, changed(folder, **config))


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        ({"visual.proj.lora_A.weight": (4, 4), "visual.proj.lora_B.weight": (4, 4)}, "visual.proj"),
        (
            {"model.embed_positions.lora_embedding_A": (4, 9), "model.embed_positions.lora_embedding_B": (9, 4)},
            "positions",
        ),
        ({"model.layers.0.self_attn.sinks": (4,)}, "sinks"),
        (
            {"model.layers.0.mlp.experts.lora_A.weight": (4, 9), "model.layers.0.mlp.experts.lora_B.weight": (9, 4)},
            "expert",
        ),
        (
            {"model.embed_tokens.lora_embedding_A": (4, 9), "model.embed_tokens.lora_embedding_B": (32, 4)},
            "another model",
        ),
        ({"lm_head.weight": (120, 32)}, "added tokens"),
        ({"model.norm.lora_magnitude_vector": (32,)}, "not a tensor of a LoRA layer"),
        ({"lm_head.lora_A.bias": (4,)}, "bias of A"),
        ({"model.embed_tokens.token_adapter.trainable_tokens_delta": (2, 32)}, "trainable_token_indices"),
    ],
)
def test_what_cannot_be_changed_is_refused_by_name(small, tensors, name):
    model, folder = small
    file = folder / "adapter_model.safetensors"
    more = {f"base_model.model.{key}": torch.ones(shape) for key, shape in tensors.items()}
    save_file({**load_file(file), **more}, file)
    with pytest.raises(CheckpointError, match=name):
        store_of(model, folder)


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
@pytest.mark.parametrize("side", ["A", "B"])
def test_numbers_that_are_not_finite_are_refused(small, number, side):
    model, folder = small
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(f"q_proj.lora_{side}.weight"))
    tensors[name][1, 2] = number
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"q_proj.lora_{side}.* not finite.*earlier checkpoint"):
        store_of(model, folder)


def test_numbers_that_are_too_large_for_the_networks_type_are_refused(small):
    model, folder = small
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[name][0, 0] = 1e6
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="too large for float16; load the model in bfloat16"):
        AdapterStore(replace(target_of(model), dtype=torch.float16), model).load(1, folder)


def test_an_adapter_of_another_size_is_refused(small):
    model, folder = small
    write_adapter(folder, {"model.layers.0.self_attn.q_proj": (64, 64)})
    with pytest.raises(CheckpointError, match="another model"):
        store_of(model, folder)


def test_a_folder_without_an_adapter_is_refused(small, tmp_path):
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        store_of(small[0], tmp_path)
    (small[1] / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="adapter_model"):
        store_of(small[0], small[1])


def test_half_of_a_pair_is_refused(small):
    model, folder = small
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="only lora_A"):
        store_of(model, folder)


def test_dora_needs_all_its_tensors_and_whole_weights(tmp_path):
    write_checkpoint(tmp_path, "llama-3")
    adapter = write_adapter(tmp_path / "adapter", layer_shapes(tmp_path), use_dora=True)
    target = target_of(load_model(tmp_path))
    sharded = replace(target, local=local_architecture(target.arch, 2), shard=Shard(target.arch, 0, 2))
    with pytest.raises(CheckpointError, match="the sum of all ranks"):
        load_part(tmp_path, 0, arrived=MergeOnLoad(adapter, sharded, None))
    with pytest.raises(CheckpointError, match="the sum of all ranks"):
        AdapterStore(sharded, load_part(tmp_path, 0)).load(1, adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    lengths = next(name for name in tensors if name.endswith("magnitude_vector"))
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != lengths}, adapter / "adapter_model.safetensors"
    )
    with pytest.raises(CheckpointError, match="DoRA"):
        MergeOnLoad(adapter, target, None)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_dora_uses_what_quantized_weights_stand_for(llama, tmp_path, kind):
    need_cpu_kernels()
    folder, _, _ = llama
    adapter = write_adapter(tmp_path / "adapter", layer_shapes(folder), use_dora=True)
    plain, merged = (quantize(load_model(folder), kind) for _ in range(2))
    lengths = {}
    for name, layer in merged.named_modules():
        if hasattr(layer, "dequantize"):
            linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
            linear.weight.data = layer.dequantize(torch.float32)
            merged.set_submodule(name, linear)
            lengths[name] = linear
    store, expected_store = store_of(plain, adapter), store_of(merged, adapter)
    packed = quantize(load_model(folder), kind)
    pack_layers(packed, (Int8Linear, Int4Linear, Fp8Linear))
    assert any(isinstance(layer, PackedLinear) for layer in packed.modules())
    for name, change in expected_store.adapters[1].layers.items():
        for other in (store, store_of(packed, adapter)):
            torch.testing.assert_close(other.adapters[1].layers[name].scale_O, change.scale_O, atol=2e-3, rtol=0.0)
    assert lengths
    expected = prompt_logits(EagerBackend(merged, room(merged, len(PROMPTS)), adapters=expected_store), [1] * 4)
    found = prompt_logits(EagerBackend(plain, room(plain, len(PROMPTS)), adapters=store), [1] * 4)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


def test_what_was_trained_as_a_whole_keeps_the_networks_type_beside_narrow_embeddings(tmp_path):
    """A file of 16 bits in a network of float32: embeddings keep its type, and what an adapter changes does not."""
    write_checkpoint(tmp_path, "mistral-v0.3", dtype=torch.bfloat16)
    options = {"modules_to_save": ["v_proj", "embed_tokens"], "target_modules": ["q_proj"]}
    adapter = write_peft_adapter(tmp_path, tmp_path / "adapter", **options)
    wide, narrow = (load_model(tmp_path, dtype=torch.float32) for _ in range(2))
    embeddings = narrow.model.embed_tokens.weight.to(torch.bfloat16)
    narrow.model.embed_tokens = NarrowEmbedding(embeddings, torch.float32)
    expected, found = (store_of(model, adapter).adapters[1] for model in (wide, narrow))
    assert torch.equal(found.embedding.weight_VE, expected.embedding.weight_VE)
    matrices = 0
    for name, change in expected.layers.items():
        for part, other in zip(change.parts, found.layers[name].parts, strict=True):
            assert torch.equal(other.a_RI, part.a_RI)
            assert other.a_RI.dtype == torch.float32
            matrices += part.b_OR is None
    assert matrices == 2


def test_an_adapter_that_changes_norms_runs_with_narrow_embeddings_as_the_last_layer(tmp_path):
    write_checkpoint(tmp_path, "smol-lm", dtype=torch.bfloat16)
    adapter = write_peft_adapter(tmp_path, tmp_path / "adapter", modules_to_save=["norm"], target_modules=["v_proj"])
    wide, narrow = (load_model(tmp_path, dtype=torch.float32) for _ in range(2))
    narrow.model.embed_tokens = NarrowEmbedding(narrow.model.embed_tokens.weight.to(torch.bfloat16), torch.float32)
    logits = [
        prompt_logits(EagerBackend(model, room(model, len(PROMPTS)), adapters=store_of(model, adapter)), [1] * 4)
        for model in (wide, narrow)
    ]
    for expected, found in zip(*logits, strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCE)


# ---- experts ----

LEAVES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@pytest.mark.parametrize("naming", ["block_sparse_moe.experts.{}.w", "mlp.experts.{}.proj", "swapped"])
def test_experts_one_by_one_and_as_older_versions_of_peft_stack_them(tmp_path, naming):
    write_checkpoint(tmp_path, "mixtral")
    reference = read_checkpoint(tmp_path)
    tensors, generator = {}, torch.Generator().manual_seed(3)
    for number, layer in enumerate(reference.model.layers):
        for leaf in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, leaf)
            count, size_out, size_in = weight.shape
            parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
            a_NRI = torch.randn(count, 4, size_in, generator=generator) * 0.3
            b_NOR = torch.randn(count, size_out, 4, generator=generator) * 0.3
            weight.data += 2.0 * b_NOR @ a_NRI
            for expert in range(count):
                for part, b_OR in zip(parts, b_NOR[expert].chunk(len(parts)), strict=True):
                    name = naming.replace(".w", f".{LEAVES[part]}").replace("proj", part).format(expert)
                    tensors[f"model.layers.{number}.{name}.lora_A.weight"] = a_NRI[expert].clone()
                    tensors[f"model.layers.{number}.{name}.lora_B.weight"] = b_OR.clone()
            if naming == "swapped":
                module = f"model.layers.{number}.mlp.experts{'' if leaf == 'down_proj' else '.base_layer'}"
                tensors[f"{module}.lora_A.weight"] = b_NOR.transpose(1, 2).flatten(0, 1).contiguous()
                tensors[f"{module}.lora_B.weight"] = a_NRI.permute(2, 1, 0).flatten(1).contiguous()
    adapter = write_adapter(tmp_path / "adapter", {}, peft_version="0.18.1")
    kept = {name: one for name, one in tensors.items() if naming != "swapped" or ".swapped." not in name}
    save_file({f"base_model.model.{name}": one for name, one in kept.items()}, adapter / "adapter_model.safetensors")
    model = load_model(tmp_path)
    found = prompt_logits(EagerBackend(model, room(model, 4), adapters=store_of(model, adapter)), [1] * 4)
    for i, prompt in enumerate(PROMPTS):
        torch.testing.assert_close(found[i], expected_logits(reference, prompt), **TOLERANCE)


def test_experts_whose_sizes_do_not_tell_inputs_from_outputs_are_refused(tmp_path):
    write_checkpoint(tmp_path, "mixtral")
    model = load_model(tmp_path)
    arch = replace(model.arch, expert_size=model.arch.hidden_size)
    target = replace(target_of(model), arch=arch, local=arch)
    size = arch.num_experts * 4
    tensors = {"A": torch.ones(size, arch.hidden_size), "B": torch.ones(arch.hidden_size, size)}
    for version in ("0.18.1", "0.21.0"):
        adapter = write_adapter(tmp_path / version, {}, peft_version=version)
        module = "base_model.model.model.layers.0.mlp.experts"
        save_file(
            {f"{module}.lora_{side}.weight": one for side, one in tensors.items()},
            adapter / "adapter_model.safetensors",
        )
    with pytest.raises(CheckpointError, match=r"peft 0\.21"):
        read_adapter(tmp_path / "0.18.1", target)
    assert "model.layers.0.mlp.experts.down_proj.3" in read_adapter(tmp_path / "0.21.0", target).parts


def test_ranks_add_up_to_the_experts_of_the_whole(tmp_path):
    pytest.importorskip("peft")
    write_checkpoint(tmp_path, "mixtral")
    options = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]}
    adapter = write_peft_adapter(tmp_path, tmp_path / "adapter", target_modules=["q_proj"], **options)
    whole = load_model(tmp_path)
    numbers, x = torch.tensor([1, 1, 0, 1]), torch.randn(4, whole.arch.hidden_size)

    def mlp_output(model, store):
        with store.applied(numbers):
            return with_adapters(model, store).model.layers[1].mlp(x)

    expected, parts = mlp_output(whole, store_of(whole, adapter)), []
    assert not torch.allclose(expected, whole.model.layers[1].mlp(x), atol=0.01)
    local = local_architecture(whole.arch, 2)
    for rank in range(2):
        shard = Shard(whole.arch, rank, 2)
        model = load_model(tmp_path, build=lambda _: Transformer(local), shard=shard)
        store = AdapterStore(replace(target_of(whole), local=local, shard=shard), model)
        store.load(1, adapter)
        parts.append(mlp_output(model, store))
    torch.testing.assert_close(parts[0] + parts[1], expected, **TOLERANCE)
