"""GGUF files of families that transformers has no code for give the networks of their Hugging Face folders."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.cpu_weights import packer
from flambeau.llm.errors import CheckpointError
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.models.embeddings import RowEmbedding
from support.checkpoints import reference
from support.cpu_kernels import need_cpu_kernels
from support.gguf_architectures import KINDS
from support.gguf_converter import converted, header_of, positions_of
from support.gguf_files import by_pairs, write_gguf
from support.ranks import run_as_threads
from support.sharded import load_part
from unit.llm.checkpoints.test_gguf import network_of
from unit.llm.checkpoints.test_gguf_families import logits_of

IDS = torch.tensor([3, 1, 4, 15, 9, 26, 53, 58, 9, 7, 93, 12])
HEADS, SIZE, HIDDEN = 4, 8, 32
CONFIG = {
    "vocab_size": 101,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
HEADER = {
    "embedding_length": HIDDEN,
    "block_count": 2,
    "feed_forward_length": 48,
    "attention.head_count": HEADS,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "context_length": 128,
    "rope.freq_base": 1e4,
    "rope.dimension_count": SIZE,
}
EXPERTS = {
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 24,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.0,
}
LING = {"num_experts": 8, "num_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True}
FAMILIES = {
    "deepseek": (
        {
            "architectures": ["DeepseekForCausalLM"],
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
        },
        EXPERTS,
    ),
    "bailingmoe": ({"architectures": ["BailingMoeForCausalLM"], **LING}, {**EXPERTS, "expert_weights_norm": True}),
    "bailingmoe2": (
        {
            "architectures": ["BailingMoeV2ForCausalLM"],
            **LING,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        {
            **EXPERTS,
            "rope.dimension_count": SIZE // 2,
            "expert_shared_feed_forward_length": 48,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "expert_weights_scale": 2.5,
            "nextn_predict_layers": 1,
            "block_count": 3,
        },
    ),
}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
TOP = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
GATED = {"gate": (0, 1), "up": (0, 1), "down": (1, 0)}


def tensors_of(layers):
    """Random tensors of networks by the names that Llama's have; each layer has its heads, sizes and experts."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        value = torch.randn(shape, generator=generator) * 0.3
        return value + 1 if len(shape) == 1 else value

    found = {"model.embed_tokens.weight": draw(101, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    found["lm_head.weight"] = draw(101, HIDDEN)
    for i, layer in enumerate(layers):
        start = f"model.layers.{i}."
        shapes = {}
        if layer["kv_heads"]:
            shapes |= {"input_layernorm": (HIDDEN,), "self_attn.o_proj": (HIDDEN, HEADS * SIZE)}
            for part, heads in {"q": HEADS, "k": layer["kv_heads"], "v": layer["kv_heads"]}.items():
                shapes[f"self_attn.{part}_proj"] = (heads * SIZE, HIDDEN)
            if layer.get("has_norms"):
                shapes |= {f"self_attn.{part}_norm": (SIZE,) for part in "qk"}
        if size := layer.get("size"):
            shapes["post_attention_layernorm"] = (HIDDEN,)
            prefixes = {"mlp.": size}
            if count := layer.get("experts"):
                prefixes = {f"mlp.experts.{n}.": size for n in range(count)} | {"mlp.shared_expert.": 2 * size}
                shapes["mlp.gate"] = (count, HIDDEN)
            for prefix, width in prefixes.items():
                both = (width, HIDDEN)
                shapes |= {f"{prefix}{part}_proj": tuple(both[at] for at in order) for part, order in GATED.items()}
        found |= {f"{start}{name}.weight": draw(*shape) for name, shape in shapes.items()}
        if layer.get("has_bias"):
            found[f"{start}mlp.score_bias"] = draw(layer["experts"]) - 1
    return found


def write_both(tmp_path, architecture, tensors, config, header, *, is_paired, kv_heads=(2, 2)):
    """The same network as a folder and as a file."""
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    found, stacks = {}, {}
    for name, tensor in tensors.items():
        if name in TOP:
            found[f"{TOP[name]}.weight"] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        rest, start = rest.removesuffix(".weight"), f"blk.{layer}."
        if rest.startswith("mlp.experts."):
            _, _, expert, part = rest.split(".")
            stacks.setdefault(f"{start}ffn_{part.removesuffix('_proj')}_exps.weight", {})[int(expert)] = tensor
        elif rest == "mlp.score_bias":
            found[f"{start}exp_probs_b.bias"] = tensor
        else:
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": kv_heads[int(layer)]}.get(rest)
            found[f"{start}{NAMES[rest]}.weight"] = by_pairs(tensor, heads) if heads and is_paired else tensor
    found |= {name: torch.stack([one for _, one in sorted(parts.items())]) for name, parts in stacks.items()}
    if not is_paired:
        for layer in range(2):
            parts = [found.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
            found[f"blk.{layer}.attn_qkv.weight"] = torch.cat(parts)
    path = tmp_path / "file" / "model.gguf"
    write_gguf(path, architecture, found, {**HEADER, **header})
    return folder, path


@pytest.mark.parametrize("architecture", FAMILIES)
def test_network_is_that_of_the_folder(tmp_path, architecture):
    config, header = FAMILIES[architecture]
    second = architecture == "bailingmoe2"
    layers = [
        {"kv_heads": 2, "size": 48, "has_norms": second},
        {"kv_heads": 2, "size": 24, "experts": 8, "has_norms": second, "has_bias": second},
    ]
    folder, path = write_both(tmp_path, architecture, tensors_of(layers), config, header, is_paired=not second)
    expected = logits_of(load_model(folder, dtype=torch.float32))
    torch.testing.assert_close(logits_of(load_model(path, dtype=torch.float32)), expected, rtol=1e-4, atol=1e-4)
    assert read_architecture(path).unknown_keys == ()


BLOCKS = (
    {"attention": {"n_heads_in_group": 2}, "ffn": {"intermediate_size": 64}},
    {"attention": {"no_op": True}, "ffn": {"intermediate_size": 96}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
    {"attention": {"n_heads_in_group": 1}, "ffn": {"intermediate_size": 32}},
)


def test_layers_of_llama_nemotron_differ(tmp_path):
    kv_heads, sizes = [2, 0, 1, 4], [64, 96, 0, 32]
    tensors = tensors_of([{"kv_heads": kv, "size": size} for kv, size in zip(kv_heads, sizes, strict=True)])
    config = {"architectures": ["DeciLMForCausalLM"], "num_hidden_layers": 4, "num_key_value_heads": None}
    config |= {"block_configs": BLOCKS, "intermediate_size": None, "num_experts_per_tok": None}
    header = {
        "block_count": 4,
        "attention.head_count": [HEADS, 0, HEADS, HEADS],
        "attention.head_count_kv": kv_heads,
        "feed_forward_length": sizes,
    }
    config["moe_intermediate_size"] = None
    folder, path = write_both(tmp_path, "deci", tensors, config, header, is_paired=True, kv_heads=kv_heads)
    expected = logits_of(load_model(folder, dtype=torch.float32))
    torch.testing.assert_close(logits_of(load_model(path, dtype=torch.float32)), expected, rtol=1e-4, atol=1e-4)
    assert read_architecture(path).unknown_keys == ()
    (tmp_path / "linear").mkdir()
    header["attention.head_count"] = [HEADS] * 4
    _, path = write_both(tmp_path / "linear", "deci", tensors, config, header, is_paired=True, kv_heads=kv_heads)
    with pytest.raises(CheckpointError, match=r"layer 1 of .* has a linear layer for attention"):
        load_model(path)


def test_embeddings_of_layers_stay_as_they_are(tmp_path, monkeypatch):
    """Of Gemma 4: more than half of its smallest models. The kernels and both ranks read rows of integers."""
    need_cpu_kernels()
    architecture, values = KINDS["gemma-4"]
    model = reference("gemma-4")
    tensors = converted(model, tmp_path / "folder", architecture) | positions_of(model, architecture)
    packed = {name for name, one in tensors.items() if one.dim() > 1 and one.shape[-1] % 32 == 0}
    path, header = tmp_path / "file" / "model.gguf", header_of(model.config, **values)
    write_gguf(path, architecture, tensors, header, lambda name: "Q5_1" if name in packed else "F32")
    arrived = packer(path, read_architecture(path, KeptForms(groups="cpu")), torch.float32)
    by_layers = load_model(path, dtype=torch.float32, forms=KeptForms(groups="cpu"), arrived=arrived)
    found = network_of(path, kv_cache_dtype="float32")
    assert isinstance(found.model.model.layer_inputs.embed_tokens, RowEmbedding)
    assert found.decode_path == "CPU kernels"
    places, size = torch.arange(len(IDS)), found.cache.block_size
    table = torch.arange(1, 2 + len(IDS) // size).unsqueeze(0)
    inputs = StepInputs(IDS, places, size + places, torch.tensor([0, len(IDS)]), torch.tensor([len(IDS)]), table)
    with torch.inference_mode():
        expected = by_layers.logits(by_layers(IDS, places, WholeAttention()))
        logits = found.prefill(inputs, places)
    assert (logits - expected).norm() < 1e-5 * expected.norm()
    plain = logits_on(load_model(path, dtype=torch.float32))
    parts = [load_part(path, rank, forms=KeptForms(groups="cpu")) for rank in range(2)]
    assert all(isinstance(part.model.layer_inputs.embed_tokens, RowEmbedding) for part in parts)
    for logits in run_as_threads(monkeypatch, lambda rank: logits_on(parts[rank])):
        torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-4)


def logits_on(model):
    with torch.inference_mode():
        return model.logits(model(IDS, torch.arange(len(IDS)), WholeAttention()))
