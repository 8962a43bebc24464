"""The names of tensors in GGUF files, and those that they have elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from flambeau.llm.checkpoints.gguf_recurrent import (
    DELTA_NET_MODULES,
    HAVE_STEP_PROJECTIONS,
    KIMI_MODULES,
    MODULES,
    TIME_STEP_BIAS,
    WHOLE,
    is_recurrent,
)
from flambeau.llm.gguf_header import GgufHeader

MAX_STREAMS = 8  # of Gemma 3n
TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embed_norm",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.layer_inputs.embed_tokens",
    "per_layer_model_proj": "model.layer_inputs.projection",
    "per_layer_proj_norm": "model.layer_inputs.norm",
    **{f"altup_proj.{i}": f"model.streams.projections.{i}" for i in range(MAX_STREAMS)},
    **{f"altup_unembd_proj.{i}": f"model.streams.unembed_projections.{i}" for i in range(MAX_STREAMS)},
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_gate": "self_attn.gate_proj",
    "attn_sub_norm": "self_attn.inner_norm",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_sub_norm": "mlp.inner_norm",
    "ffn_latent_down": "mlp.fc1_latent_proj",
    "ffn_latent_up": "mlp.fc2_latent_proj",
    "inp_gate": "layer_input.gate",
    "proj": "layer_input.projection",
    "post_norm": "layer_input.norm",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.norm",
    **{f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},  # as DeepSeek's
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    **MODULES,
}
WHOLE_NAMES = {  # of tensors that are no weight or bias of a module
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.score_bias",
    "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    "ffn_norm": "post_attention_layernorm.weight",  # Falcon H1
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "layer_output_scale.weight": "layer_scale",
    **WHOLE,
}
BOTH_NORMS = {"ffn_norm": "pre_feedforward_layernorm"}
LAST_NORM = {"token_embd_norm": "model.norm"}
OTHER_NAMES: dict[str, Mapping[str, str]] = {  # of single architectures
    "glm4": {"ffn_norm": "pre_feedforward_layernorm", "ffn_up": "mlp.gate_up_proj"},
    "afmoe": BOTH_NORMS,
    "gemma2": BOTH_NORMS,
    "gemma3": BOTH_NORMS,
    "gemma3n": BOTH_NORMS,
    "gemma4": {
        **BOTH_NORMS,
        "ffn_gate_inp": "mlp.sparse.gate",
        "ffn_gate_exps": "mlp.sparse.experts.gate_proj",
        "ffn_up_exps": "mlp.sparse.experts.up_proj",
        "ffn_down_exps": "mlp.sparse.experts.down_proj",
        "ffn_gate_up_exps": "mlp.sparse.experts.gate_up_proj",
        "pre_ffw_norm_2": "mlp.expert_norm",
        "post_ffw_norm_1": "mlp.dense_norm",
        "post_ffw_norm_2": "mlp.sparse_norm",
    },
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "chatglm": {"ffn_up": "mlp.gate_up_proj"},
    "lfm2": LAST_NORM,
    "lfm2moe": LAST_NORM,
}
OTHER_WHOLE_NAMES = {
    "gemma4": {"ffn_gate_inp.scale": "mlp.router_norm.weight", "ffn_down_exps.scale": "mlp.sparse.expert_scales"}
}
FALCON_NORMS = {"attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}  # of its larger models
LATENT_KEYS, LATENT_VALUES, LATENT = "attn_k_b.weight", "attn_v_b.weight", "self_attn.kv_b_proj.weight"
CONSTANTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read with the header


def own_name(name: str, header: GgufHeader) -> str:
    """The usual name of a tensor; unknown ones are kept."""
    start, rest, architecture = "", name, header.architecture
    if name.startswith("blk.") and name.count(".") > 1:
        _, layer, rest = name.split(".", 2)
        start = f"model.layers.{layer}."
    if start and rest == "ssm_dt.bias" and architecture not in HAVE_STEP_PROJECTIONS:
        return start + TIME_STEP_BIAS
    whole = {**WHOLE_NAMES, **OTHER_WHOLE_NAMES.get(architecture, {})}
    if start and rest in whole:
        return start + whole[rest]
    module, _, leaf = rest.rpartition(".")
    names = {**(LAYER_NAMES if start else TOP_NAMES), **OTHER_NAMES.get(architecture, {})}
    if is_recurrent(name, header):
        names |= KIMI_MODULES if architecture == "kimi-linear" else DELTA_NET_MODULES
    if architecture == "falcon" and "blk.0.attn_norm_2.weight" in header.tensors:
        names |= FALCON_NORMS
    if architecture == "deci" and start and f"blk.{name.split('.')[1]}.attn_output.weight" not in header.tensors:
        names |= {"ffn_norm": "input_layernorm"}
    if module not in names:
        return name
    return start + names[module] if module.endswith("_exps") else f"{start}{names[module]}.{leaf}"


def factored_name(name: str, header: GgufHeader) -> str | None:
    """The weights that a tensor is a factor of, or has the factors of single experts for."""
    module, _, leaf = name.rpartition(".")
    is_own = name.split(".", 2)[-1] in OTHER_WHOLE_NAMES.get(header.architecture, {})
    return f"{module}.weight" if leaf == "scale" and not is_own and f"{module}.weight" in header.tensors else None


def is_unused(name: str, header: GgufHeader, has_further: bool = False) -> bool:
    """Whether a tensor has no effect here, or is read with the header; `has_further`: further tokens are predicted."""
    is_constant = name in CONSTANTS or name.endswith(".input_scale")
    return is_constant or (is_further(name, header) and not has_further)


def latent_name(name: str) -> str:
    return f"model.layers.{name.split('.')[1]}.{LATENT}"


def is_further(name: str, header: GgufHeader) -> bool:
    """Whether a tensor belongs to a layer that predicts further tokens; they come last."""
    further = header.get("nextn_predict_layers") or 0
    layer = name.split(".")[1] if name.startswith("blk.") else ""
    return bool(further) and layer.isdigit() and int(layer) >= header.get("block_count") - further
