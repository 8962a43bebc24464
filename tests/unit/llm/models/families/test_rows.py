"""Families that transformers has no code for: each has the parts of another, in files with other names."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.hugging_face import from_hugging_face
from support.checkpoints import config_of, write_checkpoint
from unit.llm.models.families.test_llama_like import TOLERANCE, expected_logits, found_logits, fused, rewrite

EXAONE_NAMES = {
    r"^model\.embed_tokens\.": "transformer.wte.",
    r"^model\.norm\.": "transformer.ln_f.",
    r"^model\.layers\.": "transformer.h.",
    r"\.input_layernorm\.": ".ln_1.",
    r"\.post_attention_layernorm\.": ".ln_2.",
    r"\.self_attn\.o_proj\.": ".attn.attention.out_proj.",
    r"\.self_attn\.": ".attn.attention.",
    r"\.mlp\.gate_proj\.": ".mlp.c_fc_0.",
    r"\.mlp\.up_proj\.": ".mlp.c_fc_1.",
    r"\.mlp\.down_proj\.": ".mlp.c_proj.",
}
BAILING_NAMES = {
    r"^model\.embed_tokens\.": "model.word_embeddings.",
    r"\.self_attn\.query_key_value\.": ".attention.query_key_value.",
    r"\.self_attn\.o_proj\.": ".attention.dense.",
    r"\.self_attn\.q_norm\.": ".attention.query_layernorm.",
    r"\.self_attn\.k_norm\.": ".attention.key_layernorm.",
    r"\.mlp\.gate\.e_score_correction_bias$": ".mlp.gate.expert_bias",
}
NO_GLM_KEYS = dict.fromkeys(
    ("n_routed_experts", "n_shared_experts", "attention_bias", "num_local_experts", "shared_intermediate_size")
)


def renamed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    for pattern, name in names.items():
        tensors = {re.sub(pattern, name, key): tensor for key, tensor in tensors.items()}
    return tensors


def with_fused_attention(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return renamed(fused(tensors, "self_attn.query_key_value", lambda *parts: torch.cat(parts)), BAILING_NAMES)


def test_exaone_3_is_a_llama_with_the_names_of_gpt_2(tmp_path):
    reference = write_checkpoint(tmp_path, "llama-3.1")
    keys = {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "num_layers": 2, "embed_dropout": 0.0}
    keys |= {"activation_function": "silu", "layer_norm_epsilon": 1e-6, "rms_norm_eps": None, "hidden_act": None}
    no_keys = dict.fromkeys(("num_hidden_layers", "attention_bias", "mlp_bias"))
    rewrite(tmp_path, {**keys, **no_keys}, lambda tensors: renamed(tensors, EXAONE_NAMES))
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)


BLOCKS = (  # of Llama-Nemotron: attention with groups of heads, feed-forward layers with a factor of their size
    ({"n_heads_in_group": 2}, {"ffn_mult": 0.5}),
    ({"no_op": True}, {"ffn_mult": 20.0}),
    ({"n_heads_in_group": 4, "sparsify": None}, {"no_op": True}),
    ({"n_heads_in_group": 1, "window_length": None, "num_sink_tokens": None}, {"ffn_mult": 5.25}),
)


def without_blocks(reference, heads_per_layer, sizes):
    """Change a Llama of transformers into one whose layers differ: no size stands for a part that is not there."""
    torch.manual_seed(3)
    names = set()
    for number, (kv_heads, size) in enumerate(zip(heads_per_layer, sizes, strict=True)):
        layer, at = reference.model.layers[number], f"model.layers.{number}"
        attention, mlp = layer.self_attn, layer.mlp
        if kv_heads:
            attention.num_key_value_groups = 4 // kv_heads
            attention.k_proj, attention.v_proj = (torch.nn.Linear(32, 8 * kv_heads, bias=False) for _ in range(2))
        else:
            layer.self_attn.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
            names |= {f"{at}.input_layernorm.weight"} | {f"{at}.self_attn.{part}_proj.weight" for part in "qkvo"}
        if size:
            mlp.gate_proj, mlp.up_proj = (torch.nn.Linear(32, size, bias=False) for _ in range(2))
            mlp.down_proj = torch.nn.Linear(size, 32, bias=False)
        else:
            mlp.forward = torch.zeros_like
            names |= {f"{at}.post_attention_layernorm.weight"}
            names |= {f"{at}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    return {name: tensor for name, tensor in reference.state_dict().items() if name not in names}


def test_layers_of_llama_nemotron_differ(tmp_path):
    reference = write_checkpoint(tmp_path, "llama-3.1", num_hidden_layers=4)
    tensors = without_blocks(reference, (2, 0, 1, 4), (256, 512, 0, 256)).items()
    keys = {"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "intermediate_size": None}
    blocks = [{"attention": attention, "ffn": mlp} for attention, mlp in BLOCKS]
    rewrite(
        tmp_path,
        {**keys, "num_key_value_heads": None, "block_configs": blocks},
        lambda _: {name: tensor.contiguous() for name, tensor in tensors},
    )
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)
    assert load_model(tmp_path).arch.unknown_keys == ()
    blocks[2]["attention"] = {"replace_with_linear": True, "n_heads_in_group": None}
    rewrite(tmp_path, {"block_configs": blocks}, lambda tensors: tensors)
    with pytest.raises(CheckpointError, match="replace_with_linear True of attention in layer 2"):
        load_model(tmp_path)


def test_layers_of_decilm_have_different_key_value_heads(tmp_path):
    reference = write_checkpoint(tmp_path, "llama-2")
    tensors = {name: tensor.clone() for name, tensor in without_blocks(reference, (1, 4), (56, 24)).items()}
    for name in [name for name in tensors if ".mlp." in name]:
        tensors[name] = torch.zeros(56, 32).t().contiguous() if "down" in name else torch.ones(56, 32)
    for layer in reference.model.layers:
        layer.mlp.forward = torch.zeros_like
    keys = {"architectures": ["DeciLMForCausalLM"], "model_type": "deci", "num_key_value_heads_per_layer": [1, 4]}
    rewrite(tmp_path, {**keys, "num_key_value_heads": None}, lambda _: tensors)
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)


def test_internlm_1_is_a_llama_with_biases_in_attention(tmp_path):
    reference = write_checkpoint(tmp_path, "llama-biased")
    for name, parameter in reference.named_parameters():
        if ".mlp." in name and name.endswith(".bias"):
            parameter.zero_()
    keys = {"architectures": ["InternLMForCausalLM"], "model_type": "internlm", "bias": True}
    keys |= {"attention_bias": None, "mlp_bias": None, "rotary": {"base": 10000, "type": "dynamic"}}

    def without_biases(tensors):
        return {name: tensor for name, tensor in tensors.items() if not re.search(r"\.mlp\..*bias$", name)}

    rewrite(tmp_path, keys, without_biases)
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)
    rewrite(tmp_path, {"rotary": {"base": 20000, "type": "dynamic"}}, without_biases)
    with pytest.raises(CheckpointError, match="rotary"):
        load_model(tmp_path)


def test_minicpm_is_a_granite_whose_factors_depend_on_its_size(tmp_path):
    reference = write_checkpoint(
        tmp_path, "granite"
    )  # embeddings by 6, what is added by 0.5, scores by 0.1, logits by 1/4
    keys = {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 6, "mup_denominator": 32}
    keys |= {"scale_depth": 0.5 * math.sqrt(2), "dim_model_base": 8, "tie_word_embeddings": False}
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    no_keys = dict.fromkeys((*names, "attention_bias", "mlp_bias"))
    for layer in reference.model.layers:
        layer.self_attn.scaling = 8**-0.5
    rewrite(tmp_path, {**keys, **no_keys}, lambda tensors: tensors)
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)
    rewrite(tmp_path, {"sparse_config": {"dense_len": 8192}}, lambda tensors: tensors)
    with pytest.raises(CheckpointError, match="sparse_config"):
        load_model(tmp_path)


def test_text_of_phi_4_multimodal_is_phi_4_mini(tmp_path):
    reference = write_checkpoint(tmp_path, "phi-4-mini")
    keys = {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm", "speech_lora": {"r": 2}, "embd_layer": {}}

    def change(tensors):
        found = renamed(tensors, {r"_proj\.weight": "_proj.base_layer.weight"})
        name = "model.layers.0.self_attn.qkv_proj.lora_{}.speech.weight"
        more = {name.format(side): torch.ones(2, 2) for side in "AB"}
        return {**found, **more, "model.embed_tokens_extend.audio_embed.weight": torch.ones(3)}

    rewrite(tmp_path, keys, change)
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)


def test_ling_2_has_the_experts_of_glm(tmp_path):
    reference = write_checkpoint(tmp_path, "glm-4.5", attention_bias=False)
    keys = {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "num_experts": 8}
    keys |= {"num_shared_experts": 1, "moe_router_enable_expert_bias": True, "score_function": "sigmoid"}
    keys |= {"use_bias": False, "use_qkv_bias": False, "router_dtype": "fp32"}
    rewrite(tmp_path, {**NO_GLM_KEYS, **keys}, with_fused_attention)
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)


def test_ling_1_has_a_softmax_over_experts(tmp_path):
    reference = write_checkpoint(tmp_path, "granite-moe-shared")
    keys = {"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe", "num_experts": 4}
    keys |= {"num_shared_experts": 2, "norm_topk_prob": True, "moe_intermediate_size": 56}
    keys |= {"moe_shared_expert_intermediate_size": 12, "norm_head": False, "use_bias": False, "use_qkv_bias": False}
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    for layer in reference.model.layers:
        layer.self_attn.scaling = 8**-0.5

    def change(tensors):
        found = {}
        for name, tensor in tensors.items():
            if name.endswith("block_sparse_moe.input_linear.weight"):
                for i, expert in enumerate(tensor):
                    gate, up = expert.chunk(2)
                    start = name.replace("block_sparse_moe.input_linear.weight", f"mlp.experts.{i}.")
                    found |= {f"{start}gate_proj.weight": gate, f"{start}up_proj.weight": up}
            elif name.endswith("block_sparse_moe.output_linear.weight"):
                start = name.replace("block_sparse_moe.output_linear.weight", "mlp.experts.")
                found |= {f"{start}{i}.down_proj.weight": expert for i, expert in enumerate(tensor)}
            elif name.endswith("shared_mlp.input_linear.weight"):
                gate, up = tensor.chunk(2)
                start = name.replace("shared_mlp.input_linear.weight", "mlp.shared_experts.")
                found |= {f"{start}gate_proj.weight": gate, f"{start}up_proj.weight": up}
            else:
                name = name.replace("shared_mlp.output_linear", "mlp.shared_experts.down_proj")
                found[re.sub(r"block_sparse_moe\.router\.(layer\.)?", "mlp.gate.", name)] = tensor
        return with_fused_attention(found)

    rewrite(tmp_path, {**dict.fromkeys(names), "mlp_bias": None, **NO_GLM_KEYS, **keys}, change)
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)
    rewrite(tmp_path, {"norm_head": True}, lambda tensors: tensors)
    with pytest.raises(CheckpointError, match="norm_head"):
        load_model(tmp_path)


def test_the_first_deepseek_has_the_experts_of_qwen_without_a_gate_for_the_shared_one(tmp_path):
    reference = write_checkpoint(tmp_path, "qwen-2-moe", mlp_only_layers=[0], qkv_bias=False)
    for layer in list(reference.model.layers)[1:]:
        layer.mlp.shared_expert_gate.weight.zero_()  # half of it
    keys = {"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "n_routed_experts": 6}
    keys |= {"n_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1, "scoring_func": "softmax"}
    keys |= {"moe_intermediate_size": 24}
    no_keys = dict.fromkeys(
        (
            *("num_experts", "shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "qkv_bias"),
            *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
        )
    )

    def change(tensors):
        found = {name: tensor for name, tensor in tensors.items() if "shared_expert_gate" not in name}
        halves = {name: tensor / 2 for name, tensor in found.items() if "shared_expert.down_proj" in name}
        # 40 channels become 2 shared experts of 24; the others are zero
        for part in ("gate_proj", "up_proj"):
            wide = {name: tensor for name, tensor in found.items() if f"shared_expert.{part}" in name}
            halves |= {name: torch.cat((tensor, torch.zeros(8, tensor.shape[1]))) for name, tensor in wide.items()}
        for name in [name for name in halves if "down_proj" in name]:
            halves[name] = torch.cat((halves[name], torch.zeros(halves[name].shape[0], 8)), dim=1)
        return renamed({**found, **halves}, {r"\.shared_expert\.": ".shared_experts."})

    rewrite(tmp_path, {**no_keys, **keys}, change)
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)


def test_text_of_kimi_2_is_deepseek_3(tmp_path, caplog):
    reference = write_checkpoint(tmp_path, "deepseek-v3")
    text = {**config_of("deepseek-v3"), "model_type": "kimi_k2", "num_nextn_predict_layers": 0}
    no_keys = dict.fromkeys(key for key in text if key not in ("dtype", "transformers_version"))
    keys = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    vision = {"vision_tower.a": torch.ones(2), "mm_projector.b": torch.ones(2)}
    rewrite(
        tmp_path, {**no_keys, **keys}, lambda tensors: {f"language_model.{k}": v for k, v in tensors.items()} | vision
    )
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)
    assert "2 tensors are left out, as those of pictures" in caplog.text


def test_first_gemmas_say_gelu_and_mean_its_approximation():
    arch = from_hugging_face({**config_of("gemma"), "hidden_act": "gelu", "hidden_activation": None})
    assert arch.activation == "gelu_tanh"


def test_mamba_2_has_a_norm_for_each_group(tmp_path):
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    reference = write_checkpoint(tmp_path, "mamba-2", n_groups=2)
    for layer in reference.backbone.layers:
        grouped = Zamba2RMSNormGated(64, 32, eps=layer.mixer.norm.variance_epsilon)
        grouped.weight = layer.mixer.norm.weight
        layer.mixer.norm = grouped
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)
