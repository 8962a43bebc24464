"""Families with recurrent layers find what transformers finds: whole, in chunks, beside others and token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flambeau.llm.adapters.lora_weights import AdapterTarget, read_adapter
from flambeau.llm.backends.cpu.network import CpuNetwork, can_compute
from flambeau.llm.backends.eager import EagerBackend, WholeAttention
from flambeau.llm.calibration import calibrate_model
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.quantized import save_quantized
from flambeau.llm.errors import CheckpointError, InvalidRequest
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.int4 import scale_and_minimum
from flambeau.llm.quantize.quantizer import quantize
from flambeau.llm.quantize.settings import QuantizationSettings
from support.adapters import write_peft_adapter
from support.checkpoints import HYBRID_KINDS, VOCAB_SIZE, config_of, write_checkpoint
from support.cpu_kernels import need_cpu_kernels
from support.llm_steps import BLOCK_SIZE, BLOCKS_EACH, step_inputs
from support.ranks import logits_in_threads

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}  # of logits up to 14
# Roots of 1 - exp(x) for small x: the rounding of transformers is 1e-4 itself, beside its float64 network.
WIDE_TOLERANCE = {"recurrent-gemma": {"atol": 2e-4, "rtol": 0.0}}
LENGTH = 31  # the room of a sequence is 32


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


def some_ids(length: int, seed: int = 7) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_logits(reference: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([ids])).logits[0].float()


def backend_for(model: Transformer, num_sequences: int, kind: str = "plain") -> EagerBackend | KernelSteps:
    """Its caches begin with rubbish."""
    cache = KVCache(model.arch, 1 + num_sequences * BLOCKS_EACH, BLOCK_SIZE, num_slots=num_sequences)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(50.0)
    for tensor in (tensor for layer in cache.states.layers.values() for tensor in layer):
        tensor.fill_(torch.nan)
    return EagerBackend(model, cache) if kind == "plain" else KernelSteps(model, cache)


class KernelSteps:
    """Steps of the C++ kernels."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        need_cpu_kernels()
        assert can_compute(model, cache), model.arch.extras
        self.prefill = CpuNetwork(model, cache).run


def inputs_of(tokens: dict[int, tuple[int, list[int]]], query_len: int = 0):
    """A step of these sequences, whose states lie from back to front."""
    inputs = step_inputs(tokens, query_len)
    inputs.state_slots_S = torch.tensor([3 - sequence for sequence in tokens])
    return inputs


@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_logits_are_those_of_transformers(checkpoint, kind):
    model, reference = checkpoint(kind)
    ids = some_ids(120)  # more than one chunk of a scan
    with torch.inference_mode():
        whole = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), WholeAttention()))
    torch.testing.assert_close(whole, reference_logits(reference, ids), **TOLERANCE)


@pytest.mark.parametrize("backend_kind", ["plain", "kernels"])
@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_prompts_in_uneven_chunks_have_the_logits_of_transformers(checkpoint, kind, backend_kind):
    model, reference = checkpoint(kind)
    ids = {i: some_ids(LENGTH, seed=i) for i in range(3)}
    backend, found = backend_for(model, 3, backend_kind), {i: [] for i in ids}
    done = dict.fromkeys(ids, 0)
    for lengths in ({0: 5, 1: 12}, {0: 1, 1: 19, 2: 11}, {0: 25, 2: 1}, {2: 19}):
        step = {i: (done[i], ids[i][done[i] : done[i] + length]) for i, length in lengths.items()}
        num_tokens = sum(lengths.values())
        logits = backend.prefill(inputs_of(step), torch.arange(num_tokens)).split([*lengths.values()])
        for (i, length), part in zip(lengths.items(), logits, strict=True):
            found[i].append(part)
            done[i] += length
    tolerance = WIDE_TOLERANCE.get(kind, TOLERANCE) if backend_kind == "kernels" else TOLERANCE
    for i, parts in found.items():
        torch.testing.assert_close(torch.cat(parts), reference_logits(reference, ids[i]), **tolerance)


@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_30_greedy_tokens_are_those_of_transformers(checkpoint, kind):
    model, reference = checkpoint(kind)
    ids = some_ids(1)
    backend = backend_for(model, 3)
    found = [backend.prefill(inputs_of({0: (0, ids)}), torch.tensor([0]))]
    for _ in range(30):
        ids.append(int(found[-1][-1].argmax()))
        found.append(backend.decode(inputs_of({0: (len(ids) - 1, ids[-1:])}, query_len=1)))
    expected = reference_logits(reference, ids)  # each row says what follows the tokens before it
    assert expected[:-1].argmax(-1).tolist() == ids[1:]
    torch.testing.assert_close(torch.cat(found), expected, **TOLERANCE)


@pytest.mark.parametrize("kind", HYBRID_KINDS)
def test_every_key_that_transformers_writes_is_understood(checkpoint, kind):
    assert checkpoint(kind)[0].arch.unknown_keys == ()


@pytest.mark.parametrize(
    "kind",
    [
        "mamba-2",
        "lfm-2",
        "lfm-3",
        "qwen-3-next",
        "qwen-3.5",
        "granite-4-hybrid",
        "granite-4-dense",
        "jamba",
        "kimi-linear",
        "ling-3",
        "minimax-01",
        "recurrent-gemma",
        "zamba-2",
        "rwkv",
    ],
)
def test_own_quantized_files_are_read_as_they_were_written(tmp_path, kind):
    source = tmp_path / "source"
    write_checkpoint(source, kind)
    save_quantized(source, tmp_path / "int8", kind="int8")
    model = load_model(tmp_path / "int8", dtype=torch.float32)
    expected = quantize(load_model(source), "int8")
    mixers = [layer.mixer for layer in model.model.layers if hasattr(layer, "mixer")]
    assert {type(mixer.out_proj).__name__ for mixer in mixers} == {"Int8Linear"}
    assert model.arch.recurrence == expected.arch.recurrence
    ids, positions = torch.tensor(some_ids(40)), torch.arange(40)
    with torch.inference_mode():
        assert torch.equal(*(network(ids, positions, WholeAttention()) for network in (model, expected)))


@pytest.mark.parametrize(
    "kind",
    [
        "mamba-2",
        "lfm-2",
        "lfm-3",
        "qwen-3-next",
        "olmo-hybrid",
        "jamba",
        "kimi-linear",
        "minimax-01",
        "recurrent-gemma",
        "zamba-2",
        "rwkv",
    ],
)
def test_a_decode_step_is_traced_without_a_break(checkpoint, kind):
    model, _ = checkpoint(kind)
    plain, traced = backend_for(model, 3), backend_for(model, 3)
    step = inputs_of({0: (0, some_ids(9)), 1: (0, some_ids(4))})
    for backend in (plain, traced):
        backend.prefill(step, torch.tensor([8]))
    torch._dynamo.reset()
    traced.model = torch.compile(model, backend="eager", fullgraph=True)
    traced.model.logits = model.logits
    decode = inputs_of({0: (9, [5]), 1: (4, [6])}, query_len=1)
    torch.testing.assert_close(traced.decode(decode), plain.decode(decode), atol=1e-5, rtol=1e-5)


def change_tensors(folder, change) -> None:
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file)


@pytest.mark.parametrize("kind", ["qwen-3.5", "qwen-3.5-moe", "qwen-4"])
def test_the_language_model_of_qwen_is_loaded_apart_from_its_encoder(tmp_path, checkpoint, kind):
    _, reference = checkpoint(kind)
    write_checkpoint(tmp_path, kind)
    file = tmp_path / "config.json"
    text = json.loads(file.read_text())
    more = {"attn_output_gate": True, "full_attention_interval": 4, "mtp_num_hidden_layers": 1}
    names = [name.replace("ForCausalLM", "ForConditionalGeneration") for name in text.pop("architectures")]
    encoder = {"depth": 1, "out_hidden_size": text["hidden_size"]}
    whole = {"architectures": names, "model_type": "with-pictures", "vision_config": encoder}
    file.write_text(json.dumps({**whole, "text_config": {**text, **more, "mamba_ssm_dtype": "float32"}}))
    others = {"model.visual.blocks.0.norm1.weight": torch.ones(8), "mtp.fc.weight": torch.ones(8, 8)}
    change_tensors(
        tmp_path,
        lambda tensors: (
            {
                re.sub(r"^model\.(language_model\.)?", "model.language_model.", name): tensor
                for name, tensor in tensors.items()
            }
            | others
        ),
    )
    model = load_model(tmp_path)
    assert model.arch.unknown_keys == ()
    with torch.inference_mode():
        found = model.logits(model(torch.tensor(some_ids(40)), torch.arange(40), WholeAttention()))
    torch.testing.assert_close(found, reference_logits(reference, some_ids(40)), **TOLERANCE)


def test_convolutions_of_olmo_are_read_as_parts_and_as_equal_pieces(tmp_path, checkpoint, monkeypatch):
    """Its publisher writes those of queries, keys and values; transformers writes three pieces of one size."""
    write_checkpoint(tmp_path, "olmo-hybrid")

    def change(tensors):
        for layer in {name.rpartition(".q_conv1d")[0] for name in tensors if ".q_conv1d" in name}:
            names = [f"{layer}.{part}_conv1d.weight" for part in "qkv"]
            whole = torch.cat([tensors[name] for name in names])
            assert len({len(tensors[name]) for name in names}) == 1
            tensors |= dict(zip(names, whole.split([24, 24, 48]), strict=True))
        return tensors

    change_tensors(tmp_path, change)
    found, expected = load_model(tmp_path).state_dict(), checkpoint("olmo-hybrid")[0].state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for found in logits_in_threads(tmp_path, 2, some_ids(40), monkeypatch):  # test_rank_families.py has equal pieces
        torch.testing.assert_close(found, reference_logits(checkpoint("olmo-hybrid")[1], some_ids(40)), **TOLERANCE)


def test_a_type_of_layer_that_is_not_known_is_rejected_by_name():
    config = {
        "architectures": ["Lfm2ForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "intermediate_size": 16,
        "layer_types": ["conv", "sliding_attention"],
    }
    with pytest.raises(CheckpointError, match="layer_types must name 2 layers"):
        from_hugging_face(config)


def test_older_names_of_layer_types_and_infinity_are_understood(checkpoint, tmp_path):
    write_checkpoint(tmp_path, "granite-4-hybrid")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["layer_types"] = ["mamba", "attention", "mamba"]
    config["time_step_limit"] = [0.0, float("inf")]
    file.write_text(json.dumps(config))
    assert load_model(tmp_path).arch == checkpoint("granite-4-hybrid")[0].arch


def test_the_size_of_ling_s_recurrent_heads_is_in_either_key():
    """Published files have it as head_dim, those of transformers as linear_head_dim beside another head_dim."""
    config = config_of("ling-3")
    assert (config["head_dim"], config["linear_head_dim"]) == (8, 12)
    del config["linear_head_dim"]
    published = from_hugging_face({**config, "head_dim": 12})
    assert published.recurrence.head_size == 12
    assert published == from_hugging_face(config_of("ling-3"))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope"),
        ("kimi-linear", {"linear_attn_config": {"num_heads": 4, "gate": 1}}, "gate"),
        (
            "kimi-linear",
            {"layer_types": None, "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}},
            "kda",
        ),
        ("kimi-linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ("ling-3", {"q_lora_rank": 20}, "q_lora_rank"),
        ("ling-3", {"use_qkv_bias": True}, "use_qkv_bias"),
        ("minimax-01", {"postnorm": False}, "postnorm"),
        ("minimax-01", {"shared_intermediate_size": 8}, "shared_intermediate_size"),
        ("minimax-01", {"sliding_window": 9}, "sliding_window"),
        ("zamba-2", {"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ("zamba-2", {"add_bias_linear": True}, "add_bias_linear"),
        ("zamba-2", {"layers_block_type": ["mamba", "mamba", "mamba", "moe"]}, "layers_block_type"),
        ("recurrent-gemma", {"block_types": ["recurrent", "mlp"]}, "block_types"),
    ],
)
def test_settings_of_recurrent_layers_that_are_not_supported_are_refused_by_name(kind, changes, message):
    with pytest.raises(CheckpointError, match=message):
        from_hugging_face({**config_of(kind), **changes})


def test_adapters_of_blocks_that_layers_share_are_refused_by_name(tmp_path):
    """PEFT has one for each layer that uses a block."""
    write_checkpoint(tmp_path / "model", "zamba-2")
    folder = write_peft_adapter(tmp_path / "model", tmp_path / "adapter", target_modules=["q_proj"])
    arch = read_architecture(tmp_path / "model")
    target = AdapterTarget(arch=arch, local=arch, shard=None, device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(CheckpointError, match="q_proj"):
        read_adapter(folder, target)


def test_layers_of_kimi_are_counted_from_one_in_published_files():
    config = config_of("kimi-linear")
    section = {
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
        "head_dim": 12,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    }
    own = {key: config[key] for key in config if not key.startswith("linear_") and key not in ("layer_types", "dtype")}
    published = {**own, "linear_attn_config": section, "mla_use_nope": True, "moe_layer_freq": 1, "dtype": "float32"}
    assert from_hugging_face(published).recurrence == from_hugging_face(config).recurrence
    assert from_hugging_face(published).unknown_keys == ()


def test_published_files_of_minimax_have_other_keys():
    config = config_of("minimax-01")
    names = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    own = {
        f"layernorm_{name}_{factor}": config.pop(f"{key}_{factor}_factor")
        for key, name in names.items()
        for factor in ("alpha", "beta")
    }
    del config["layer_types"]
    more = {"attn_type_list": [0, 0, 1], "postnorm": True, "rotary_dim": 8, "shared_intermediate_size": 0}
    arch = from_hugging_face({**config, **own, **more, "architectures": ["MiniMaxM1ForCausalLM"]})
    expected = from_hugging_face(config_of("minimax-01"))
    assert (arch.recurrence, arch.stream_scales) == (expected.recurrence, expected.stream_scales)
    assert (arch.rotary_size, expected.rotary_size, arch.unknown_keys) == (8, None, ())


def test_layers_with_shared_blocks_are_not_calibrated_one_by_one():
    model = Transformer(from_hugging_face(config_of("zamba-2")))
    with pytest.raises(InvalidRequest, match="read more than hidden states"):
        calibrate_model(model, [*range(8)], QuantizationSettings(kind="int4"), scale_and_minimum)
