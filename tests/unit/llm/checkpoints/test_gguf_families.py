"""GGUF files of many architectures give the networks that transformers has for the same weights."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.gguf_families import ARCHITECTURES
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.checkpoints.mtp_weights import load_mtp, read_mtp
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families import llama_like
from flambeau.llm.quantize.groups import GroupedLinear
from flambeau.llm.quantize.int4 import Int4Linear
from support.checkpoints import reference
from support.gguf_architectures import BASES, KINDS, OPTIONS, options_of
from support.gguf_converter import converted, factors, header_of, positions_of, without_activations
from support.gguf_files import write_gguf
from support.ranks import logits_in_threads, run_as_threads
from support.sharded import load_part

IDS = torch.tensor([[3, 1, 4, 15, 9, 26, 53, 58, 9, 7, 93, 12, 77, 31, 8, 64]])


def write(tmp_path, kind, quantized="F32", **changes):
    architecture, values = KINDS[kind]
    model = reference(BASES.get(kind, kind), **options_of(kind) | changes)
    if "n_groups" in changes:
        values = values | {"ssm.group_count": changes["n_groups"]}
    tensors = converted(model, tmp_path / "folder", architecture)
    tensors |= positions_of(model, architecture)
    if "rope.scaling.attn_factor" in values:
        tensors |= {f"rope_factors_{name}.weight": factors(model, name) for name in ("long", "short")}
    path, extra = tmp_path / "gguf" / "model.gguf", {}
    if architecture == "apertus":
        tensors, extra = without_activations(tensors)
    header = header_of(model.config, **values)
    return model, path, write_gguf(path, architecture, tensors, header, quantized, plain=extra)


@pytest.mark.parametrize(("kind", "layer"), [("glm-4.5", 2), ("qwen-3.5-moe", 1)])
def test_layers_that_predict_further_tokens_are_read(tmp_path, kind, layer):
    """Here they are a copy of another layer."""
    architecture, values = KINDS[kind]
    model = reference(BASES.get(kind, kind), **options_of(kind))
    tensors, generator = converted(model, tmp_path / "folder", architecture), torch.Generator().manual_seed(4)
    number = model.config.get_text_config().num_hidden_layers
    old, start = f"model.layers.{layer}.", f"blk.{number}."
    own = {name.replace(old, f"model.layers.{number}."): x.clone() for name, x in tensors.items() if old in name}
    own |= {f"{start}nextn.{name}.weight": torch.ones(32) for name in ("enorm", "hnorm", "shared_head_norm")}
    own[f"{start}nextn.eh_proj.weight"] = torch.randn(32, 64, generator=generator)
    path = tmp_path / "gguf" / "model.gguf"
    write_gguf(path, architecture, tensors | own, header_of(model.config, **values), "F32")
    target = load_model(path, dtype=torch.float32)
    settings, naming = read_mtp(path, read_architecture(path))
    head = load_mtp(path, settings, naming, target, device=torch.device("cpu"), dtype=torch.float32)
    ids, hidden, places = torch.arange(3, 14), torch.randn(11, 32, generator=generator), torch.arange(11)
    with torch.inference_mode():
        both = [F.rms_norm(x, (32,), eps=target.arch.norm_epsilon) for x in (target.model.embed_tokens(ids), hidden)]
        x = torch.cat(both, dim=-1) @ own[f"{start}nextn.eh_proj.weight"].T
        x = target.model.layers[layer](x, target.rotation(places), WholeAttention())
        found = head(ids, hidden, places, WholeAttention())
    expected = F.rms_norm(x, (32,), eps=target.arch.norm_epsilon)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def logits_of(model):
    with torch.inference_mode():
        return model.logits(model(IDS[0], torch.arange(IDS.shape[1]), WholeAttention()))


def check_network(path, model):
    """The network of a file computes what that of transformers does."""
    with torch.inference_mode():
        expected = model(IDS).logits[0]
    torch.testing.assert_close(logits_of(load_model(path, dtype=torch.float32)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_network_is_that_of_transformers(tmp_path, kind):
    model, path, _ = write(tmp_path, kind)
    check_network(path, model)
    assert read_architecture(path).unknown_keys == ()


SHARED = (  # among ranks: what depends on all of them
    *("bloom", "olmo-3", "olmoe", "minimax-m2", "mamba", "falcon-mamba", "mamba-2", "lfm-2", "qwen-3-next", "qwen-3.5"),
    *("qwen-3.5-moe", "nemotron-h", "granite-4-hybrid", "falcon-h1", "jamba", "apertus", "gemma-4-moe", "kimi-linear"),
)


@pytest.mark.parametrize("kind", SHARED)
def test_two_ranks_find_what_one_finds(tmp_path, kind, monkeypatch):
    _, path, _ = write(tmp_path, kind)
    expected = logits_of(load_model(path, dtype=torch.float32))
    for found in logits_in_threads(path, 2, IDS[0].tolist(), monkeypatch):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["mamba-2", "lfm-2", "qwen-3-next", "falcon-h1", "jamba"])
def test_integers_of_recurrent_layers_stay_on_two_ranks(tmp_path, kind, monkeypatch):
    """Each projection in its own type; others have rows that no block divides."""
    model, _, tensors = write(tmp_path, kind)
    architecture, values = KINDS[kind]
    others = ("conv1d", "conv.conv", "_norm.", "A_log", "mlp.gate.weight")

    def kind_of(name):
        if tensors[name].dim() < 2 or tensors[name].shape[-1] % 32 or any(other in name for other in others):
            return "F32"
        return "Q5_1" if "v_proj" in name or "up" in name else "Q4_1"

    packed, plain = tmp_path / "packed" / "model.gguf", tmp_path / "plain" / "model.gguf"
    header = header_of(model.config, **values)
    stored = write_gguf(packed, architecture, tensors, header, kind_of)
    write_gguf(plain, architecture, stored, header)
    expected = logits_of(load_model(plain, dtype=torch.float32))
    parts = [load_part(packed, rank, forms=KeptForms(groups="cpu")) for rank in range(2)]
    for found in run_as_threads(monkeypatch, lambda rank: logits_of(parts[rank])):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    mixer = parts[1].model.layers[0].mixer
    assert any(isinstance(module, (Int4Linear, GroupedLinear)) for module in mixer.modules())


def test_the_small_baichuan_is_a_llama(tmp_path, monkeypatch):
    monkeypatch.setattr(llama_like, "BAICHUAN_7B_SIZE", 32)
    monkeypatch.setitem(KINDS, "llama-2", ("baichuan", {"rope.dimension_count": 8, "tensor_data_layout": "Meta"}))
    model, path, _ = write(tmp_path, "llama-2")
    check_network(path, model)


def test_every_architecture_is_known_to_the_package():
    assert not ARCHITECTURES.keys() - set(gguf.MODEL_ARCH_NAMES.values())


@pytest.mark.parametrize("kind", ["qwen-3-next", "qwen-3.5"])
def test_rows_and_columns_of_quantized_recurrent_layers_are_arranged(tmp_path, kind, caplog):
    sizes = {"linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    (architecture, values), options = KINDS[kind], {**OPTIONS.get(kind, {}), **sizes, "intermediate_size": 64}
    model = reference(kind, **options, shared_expert_intermediate_size=32)
    values = values | {"ssm.inner_size": 96}
    if kind == "qwen-3-next":
        values |= {"expert_count": 4, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 32}
    tensors = converted(model, tmp_path / "folder", architecture)
    header = header_of(model.config, **values)
    packed, plain = tmp_path / "packed" / "model.gguf", tmp_path / "plain" / "model.gguf"
    kinds = {name: "Q4_0" if tensor.shape[-1] % 32 == 0 else "F32" for name, tensor in tensors.items()}
    stored = write_gguf(packed, architecture, tensors, header, kinds.__getitem__)
    write_gguf(plain, architecture, stored, header)
    found = load_model(packed, dtype=torch.float32)
    torch.testing.assert_close(
        logits_of(found), logits_of(load_model(plain, dtype=torch.float32)), rtol=1e-4, atol=1e-4
    )
    mixer = found.model.layers[0].mixer
    assert "in_proj_a.scales" in dict(mixer.named_buffers()) | dict(mixer.named_parameters())


def test_groups_of_mamba_2_have_a_norm_each(tmp_path):
    """As llama.cpp and its authors compute it."""
    _, path, _ = write(tmp_path, "mamba-2", n_groups=2)
    assert read_architecture(path).recurrence.norm_groups == 2


def test_the_documentation_names_every_architecture():
    page = (Path(__file__).parents[4] / "docs/quantization.md").read_text()
    table = page.split("| `general.architecture` |")[1].split("\n\n")[0]
    assert set(re.findall(r"`([\w-]+)`", table)) == ARCHITECTURES.keys()


def test_experts_in_mxfp4_are_dequantized(tmp_path, caplog):
    """As gpt-oss is published."""
    _, path, stored = write(tmp_path, "gpt-oss", lambda name: "MXFP4" if "experts" in name else "F32")
    experts = load_model(path, dtype=torch.float32).model.layers[1].mlp.experts
    start = "model.layers.1.mlp.experts"
    torch.testing.assert_close(experts.down_proj, stored[f"{start}.down_proj.weight"])
    gates = torch.cat([stored[f"{start}.{part}_proj.weight"] for part in ("gate", "up")], dim=1)
    torch.testing.assert_close(experts.gate_up_proj, gates)
    assert "stacks of experts are dequantized" in caplog.text


def test_keys_and_values_of_latents_belong_together(tmp_path):
    model = reference("deepseek-v3")
    architecture, values = KINDS["deepseek-v3"]
    tensors = converted(model, tmp_path / "folder", architecture)
    del tensors["model.layers.1.self_attn.v_b_proj.weight"]
    path = tmp_path / "gguf" / "model.gguf"
    write_gguf(path, architecture, tensors, header_of(model.config, **values))
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_k_b\.weight without a fitting blk\.1\.attn_v_b\.weight"):
        load_model(path)


@pytest.mark.parametrize("kind", ["arcee", "granite-moe", "qwen-3.5", "nemotron-h"])
def test_queries_keys_and_values_may_be_in_one_tensor(tmp_path, kind):
    """As the converter writes them with --fuse-qkv; in some architectures, rows of queries and keys are rearranged."""
    architecture, values = KINDS[kind]
    model = reference(kind, **options_of(kind))
    tensors = converted(model, tmp_path / "folder", architecture)
    for name in [name for name in tensors if name.endswith(".q_proj.weight")]:
        parts = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        tensors[f"blk.{name.split('.')[2]}.attn_qkv.weight"] = torch.cat(parts)
    path = tmp_path / "gguf" / "model.gguf"
    write_gguf(path, architecture, tensors, header_of(model.config, **values))
    check_network(path, model)


def test_joint_projections_of_older_files_are_read(tmp_path):
    model = reference("qwen-3-next", **options_of("qwen-3-next"))
    architecture, values = KINDS["qwen-3-next"]
    tensors = converted(model, tmp_path / "folder", architecture)
    tensors = {
        name: tensor for name, tensor in tensors.items() if not name.endswith(("attn_qkv.weight", "attn_gate.weight"))
    }
    for name, tensor in load_file(tmp_path / "folder" / "model.safetensors").items():
        if ".in_proj_qkvz." in name:
            tensors[f"blk.{name.split('.')[2]}.ssm_in.weight"] = tensor
    path = tmp_path / "gguf" / "model.gguf"
    write_gguf(path, architecture, tensors, header_of(model.config, **values))
    check_network(path, model)


def test_whole_latents_of_older_files_are_read(tmp_path):
    """Their sizes are those of single heads, and one tensor makes keys and values."""
    model = reference("deepseek-v3")
    architecture, values = KINDS["deepseek-v3"]
    tensors = converted(model, tmp_path / "folder", "an older one")
    older = {key: value for key, value in values.items() if not key.endswith("_mla")}
    older |= {"attention.key_length": 20, "attention.value_length": 10}
    path = tmp_path / "gguf" / "model.gguf"
    write_gguf(path, architecture, tensors, header_of(model.config, **older))
    check_network(path, model)
