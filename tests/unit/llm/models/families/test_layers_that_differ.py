"""Gemma 3n and 4: files of the whole model, settings that are refused, and engines with batches and prefixes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flambeau.llm.backends.cpu.backend import CpuBackend
from flambeau.llm.calibration import calibrate_model
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.checkpoints.quantized import save_quantized
from flambeau.llm.errors import CheckpointError, InvalidRequest, LLMError
from flambeau.llm.executor.kv_cache import KVCache, block_bytes
from flambeau.llm.executor.shard import local_architecture
from flambeau.llm.loader import load_engine
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.quantize.int4 import scale_and_minimum
from flambeau.llm.quantize.row_scaled import Int8Linear
from flambeau.llm.quantize.settings import QuantizationSettings
from flambeau.llm.sampling_params import SamplingParams
from support.adapters import read_peft_adapter, write_peft_adapter
from support.checkpoints import VOCAB_SIZE, config_of, write_checkpoint
from support.tiny_models import tiny_engine
from support.tokenizer_files import write_sentencepiece
from unit.llm.models.families.test_llama_like import TOLERANCE, expected_logits, found_logits

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
WHOLE = {  # the class of a model with images and sounds, and what its text is called
    "gemma-3n": ("Gemma3nForConditionalGeneration", "gemma3n_text"),
    "gemma-4": ("Gemma4ForConditionalGeneration", "gemma4_text"),
    "gemma-4-moe": ("Gemma4ForConditionalGeneration", "gemma4_text"),
    "gemma-4-unified": ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text"),
}
PUBLISHED_KEYS = {"global_head_dim": 32, "num_global_key_value_heads": 2}  # in the place of per_layer_config


def prompt(length: int, seed: int = 5) -> list[int]:
    return torch.randint(3, VOCAB_SIZE - 6, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("kind", WHOLE)
def test_text_of_a_model_with_images_and_sounds_is_read_as_it_is_published(tmp_path, caplog, kind):
    reference = write_checkpoint(tmp_path, kind)
    file, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    text = json.loads(file.read_text())
    architecture, text["model_type"] = WHOLE[kind]
    if text.pop("per_layer_config", None) is not None:
        text |= PUBLISHED_KEYS
    file.write_text(json.dumps({"architectures": [architecture], "text_config": text, "vision_config": {"depth": 1}}))
    tensors = {
        f"model.language_model.{name.removeprefix('model.')}": value for name, value in load_file(weights).items()
    }
    last = text["num_hidden_layers"] - 1
    if text.get("num_kv_shared_layers"):  # files have keys that nobody reads
        tensors[f"model.language_model.layers.{last}.self_attn.k_proj.weight"] = torch.ones(3, 3)
    others = ("model.vision_tower.a", "model.embed_vision.b", "model.audio_tower.c", "model.embed_audio.d")
    save_file({**tensors, **{name: torch.ones(2) for name in others}}, weights)
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)


REFUSED: list[tuple[str, str, Any]] = [
    ("gemma-4", "use_bidirectional_attention", "all"),
    ("gemma-4", "num_kv_shared_layers", 4),
    ("gemma-4", "per_layer_config", {"0": {"sliding_window": 7}}),
    ("gemma-4", "layer_types", ["sliding_attention", "chunked_attention", "full_attention", "full_attention"]),
    ("gemma-3n", "activation_sparsity_pattern", [0.5, 1.0, 0.0, 0.0]),
    ("gemma-3n", "intermediate_size", [56, 40]),
    ("granite-swa", "layer_rope_theta", [5000.0, 6000.0, 7000.0]),
    ("cohere-2-moe", "shared_expert_combination_strategy", "average"),
    ("cohere-2-moe", "expert_selection_fn", "relu"),
    ("laguna", "gating", "none"),
    ("laguna", "moe_router_logit_softcapping", 30.0),
    ("afmoe", "score_func", "softmax"),
    ("hy-3", "mlp_bias", True),
    ("apertus", "post_norm", True),
    ("gpt-neo", "attention_layers", ["global", "middle"]),
    ("gpt-1", "afn", "mish"),
]


@pytest.mark.parametrize(("kind", "key", "value"), REFUSED)
def test_value_that_is_not_supported_is_refused_by_name(kind, key, value):
    with pytest.raises(CheckpointError, match=key.replace("attention_layers", "attention_types")):
        from_hugging_face({**config_of(kind), key: value})


@pytest.fixture(scope="module", params=["gemma-3n", "gemma-4", "gemma-4-moe"])
def networks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    reference = write_checkpoint(folder, request.param)
    return folder, reference


def generated(reference, length: int) -> list[int]:
    ids = torch.tensor([prompt(length)])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return reference.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, length:].tolist()


def test_batches_and_prefixes_give_the_tokens_of_transformers(networks):
    folder, reference = networks
    model = load_model(folder)
    lengths = (3, 9, 30)
    expected = [generated(reference, length) for length in lengths]
    for options in ({}, {"max_step_tokens": 8}, {"speculation": "lookup", "speculate_k": 3}):
        engine = tiny_engine(model, **options)
        for _ in range(2):  # the second finds prefixes
            found = engine.generate([prompt(length) for length in lengths], GREEDY)
            assert [completion.token_ids for completion in found] == expected
        assert found[-1].counts.num_cached > 0


def test_compiled_steps_give_the_same_tokens(networks):
    folder, reference = networks
    engine = tiny_engine(load_model(folder), kind=CpuBackend)
    try:
        assert engine._backend.wait_until_compiled(300)
        assert engine.generate([prompt(9)], GREEDY)[0].token_ids == generated(reference, 9)
    finally:
        engine.close()


def test_layers_that_read_keys_of_others_take_no_memory(networks):
    arch = load_model(networks[0]).arch
    cache = KVCache(arch, 3, 4)
    shared = {layer for layer in range(arch.num_layers) if arch.key_layer(layer) != layer}
    assert {layer for layer, keys in enumerate(cache.keys) if not len(keys)} == shared
    assert sum(tensor[0].nbytes for tensor in cache.tensors) == block_bytes(arch, 4, torch.float32)


def test_int8_weights_are_written_and_read(networks, tmp_path):
    model = load_model(networks[0])
    save_quantized(networks[0], tmp_path / "int8", "int8")
    found = load_model(tmp_path / "int8")
    assert any(isinstance(module, Int8Linear) for module in found.modules())
    assert found.arch.shared_keys == model.arch.shared_keys
    torch.testing.assert_close(found_logits(tmp_path / "int8"), found_logits(networks[0]), atol=1.0, rtol=0.0)


def test_calibration_and_ranks_that_need_more_are_refused(networks):
    model = load_model(networks[0])
    with pytest.raises(InvalidRequest, match="without a text"):
        calibrate_model(model, prompt(40), QuantizationSettings(kind="int4"), scale_and_minimum)
    if any(model.arch.sparsity):
        with pytest.raises(LLMError, match="all of the intermediate size and cannot be divided among 2 ranks"):
            local_architecture(model.arch, 2)


@pytest.mark.parametrize("kind", ["gemma-4", "gemma-4-moe", "afmoe"])
def test_adapters_of_projections_give_the_tokens_of_peft(tmp_path, kind):
    """Keys that are values, too, are changed in both places; the CPU kernels leave unknown places to plain PyTorch."""
    sizes = {"vocab_size": 400, **({"vocab_size_per_layer_input": 400} if kind == "gemma-4" else {})}
    write_checkpoint(tmp_path / "model", kind, **sizes)
    write_sentencepiece(tmp_path / "model")
    folder = write_peft_adapter(tmp_path / "model", tmp_path / "one", target_modules=["q_proj", "k_proj", "o_proj"])
    adapted, ids = read_peft_adapter(tmp_path / "model", folder), torch.tensor([prompt(20)])
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat((ids, adapted(ids).logits[:, -1:].argmax(-1)), dim=1)
    options = {"device": "cpu", "block_size": 4, "num_blocks": 40, "max_num_seqs": 2}
    engine = load_engine(tmp_path / "model", lora_adapters={"one": str(folder)}, **options)
    try:
        assert engine._backend.wait_until_compiled(300)
        assert engine.generate([prompt(20)], GREEDY, adapter="one")[0].token_ids == ids[0, 20:].tolist()
    finally:
        engine.close()
