"""The supported model families, and the settings that their config.json leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flambeau.llm.errors import CheckpointError

Config = Mapping[str, Any]
# The layers with a window, unless `layer_types` names them: `pattern` leaves out every nth layer.
WindowedLayers = Literal["none", "all", "late", "unrotated", "even", "pattern"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Settings of a class of models that its config.json does not contain."""

    model_type: str
    qkv_bias: bool | None = None  # None: set by `attention_bias`
    output_bias: bool | None = None
    qk_norm: bool = False
    windowed: WindowedLayers = "none"  # the layers limited to `sliding_window`
    switches_window: bool = True  # `use_sliding_window` turns the window on
    names_layers: bool = True  # `layer_types` names the layers with a window
    has_local_rope: bool = False  # layers with a window have rope parameters of their own
    rotates_windows: bool = False  # of a model with windows, only layers with one have rotary positions
    experts: bool = False
    defaults: Config = field(default_factory=dict)  # of keys that config.json may leave out
    parts: Config = field(default_factory=dict)  # fields of Architecture that differ from Llama's
    derive: Callable[[Config], Config] | None = None  # more of them, from config.json
    understands: frozenset[str] = frozenset()  # keys that `derive` reads, which are not supported elsewhere
    epsilon_key: str = "rms_norm_eps"
    activation_key: str = "hidden_act"
    renames: tuple[tuple[str, str], ...] = ()  # of tensors: patterns and what replaces them
    aliases: Mapping[str, str] = field(default_factory=dict)  # of keys: the family's own names → Llama's
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # the values of keys that are supported
    has_kv_heads: bool = True  # False: as many as heads, whatever config.json says
    is_rotated: bool = True  # False: no layer has rotary positions
    mlp_ratio: int | None = None  # the default of the intermediate size, in hidden sizes
    dequantizes: tuple[str, ...] = ()  # quantization methods whose weights are dequantized
    has_images: bool = False  # the decoder's settings are under `text_config`, an encoder's under `vision_config`


# ---- parts that depend on config.json ----


def partial_rotation(config: Config) -> Config:
    """`partial_rotary_factor`, at the top level or among the rope parameters."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    size = int(head_size * factor)
    return {} if size == head_size else {"rotary_size": size}


def gemma(config: Config) -> Config:
    return {"embedding_scale": config["hidden_size"] ** 0.5}


def gemma_2(config: Config) -> Config:
    return {
        **gemma(config),
        "attention_scale": config["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": config.get("attn_logit_softcapping"),
        "logit_softcap": config.get("final_logit_softcapping"),
    }


def gemma_3(config: Config) -> Config:
    nested = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    local = nested.get("rope_theta") or config.get("rope_local_base_freq") or 10000.0
    return {**gemma_2(config), "local_rope_theta": float(local)}


def olmo_3(config: Config) -> Config:
    """Layers with a window are not scaled."""
    nested = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    return {"local_rope_theta": float(nested.get("rope_theta") or OLMO_3_THETA)}


def granite(config: Config) -> Config:
    return {
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "attention_scale": float(config["attention_multiplier"]),
        "logit_scale": 1.0 / config["logits_scaling"],
    }


def cohere(config: Config) -> Config:
    return {"logit_scale": float(config["logit_scale"]), "separate_qk_norm": bool(config.get("use_qk_norm"))}


def uniform_bias(config: Config) -> Config:
    """`use_bias`: all layers have one, or none."""
    has_bias = bool(config["use_bias"])
    return {"qkv_bias": has_bias, "output_bias": has_bias, "mlp_bias": has_bias}


def stablelm(config: Config) -> Config:
    return {
        **partial_rotation(config),
        "qkv_bias": bool(config["use_qkv_bias"]),
        "separate_qk_norm": bool(config.get("qk_layernorm")),
        "is_parallel": bool(config.get("use_parallel_residual")),
    }


def clipped(config: Config) -> Config:
    return {"clip_qkv": config.get("clip_qkv")}


def qwen_2_moe(config: Config) -> Config:
    return {
        "qkv_bias": bool(config["qkv_bias"]),
        "shared_expert_size": int(config["shared_expert_intermediate_size"]),
        "gates_shared_expert": True,
    }


def granite_moe_shared(config: Config) -> Config:
    return {**granite(config), "shared_expert_size": int(config["shared_intermediate_size"])}


def glm_4_moe(config: Config) -> Config:
    return {
        **partial_rotation(config),
        "qk_norm": bool(config.get("use_qk_norm")),
        "shared_expert_size": int(config["n_shared_experts"]) * int(config["moe_intermediate_size"]),
        "num_expert_groups": int(config["n_group"]),
        "num_chosen_groups": int(config["topk_group"]),
        "routed_scale": float(config["routed_scaling_factor"]),
        "dense_layers": frozenset(range(int(config["first_k_dense_replace"]))),
        "num_unused_layers": int(config.get("num_nextn_predict_layers") or 0),
    }


def gpt_oss(config: Config) -> Config:
    return {"swiglu_limit": float(config["swiglu_limit"]), "swiglu_alpha": float(config["swiglu_alpha"])}


def gpt_j(config: Config) -> Config:
    return {"rotary_size": int(config["rotary_dim"])}


def gpt_neox(config: Config) -> Config:
    is_parallel = bool(config["use_parallel_residual"])
    return {**partial_rotation(config), "is_parallel": is_parallel, "parallel_norms": is_parallel}


def falcon(config: Config) -> Config:
    """The keys of three generations: one norm or two, one key-value head, groups of them, or as many as heads."""
    is_new, heads = bool(config.get("new_decoder_architecture")), config["num_attention_heads"]
    if is_new:
        num_kv_heads = config.get("num_kv_heads") or heads
    else:
        num_kv_heads = 1 if config["multi_query"] else heads
    is_parallel = is_new or bool(config["parallel_attn"])
    num_norms = config.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
    has_bias = bool(config.get("bias"))
    return {
        "num_kv_heads": num_kv_heads,
        "is_parallel": is_parallel,
        "parallel_norms": is_parallel and num_norms == 2,
        "qkv_bias": has_bias,
        "output_bias": has_bias,
        "mlp_bias": has_bias,
    }


def opt(config: Config) -> Config:
    if config.get("word_embed_proj_dim") not in (None, config["hidden_size"]):
        raise CheckpointError("word_embed_proj_dim is not supported unless it is hidden_size")
    has_bias = bool(config["enable_bias"])
    return {"qkv_bias": has_bias, "output_bias": has_bias, "mlp_bias": has_bias}


MPT_ATTENTION: Mapping[str, tuple[Any, ...]] = {  # values of attn_config that are supported
    "attn_type": ("multihead_attention",),
    "qk_ln": (False,),
    "prefix_lm": (False,),
    "attn_uses_sequence_id": (False,),
    "alibi": (True,),
    "alibi_bias_max": (8,),
}


def mpt(config: Config) -> Config:
    attention = config["attn_config"] or {}
    for key, values in MPT_ATTENTION.items():
        if attention.get(key, values[0]) not in values:
            raise CheckpointError(
                f"attn_config has {key} {attention[key]!r}, which is not supported; only {values[0]!r}"
            )
    return {
        "intermediate_size": int(config["expansion_ratio"]) * config["hidden_size"],
        "attention_scale": attention.get("softmax_scale"),
        "clip_qkv": attention.get("clip_qkv"),
    }


def seed_oss(config: Config) -> Config:
    return {"output_bias": bool(config["attention_out_bias"])}


OLMO_3_THETA = 5e5
CLIP_KEYS = frozenset({"clip_qkv"})
PLAIN_PARTS = {"norm": "layer", "norm_bias": True, "has_gate": False}
GPT_ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}
GPT_2_NAMES = (
    (r"^(?=h\.|wte\.|wpe\.|ln_f\.)", "transformer."),  # files of the base model have no prefix
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.wpe\.", "model.embed_positions."),
    (r"^transformer\.h\.", "model.layers."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
DENSE_NAMES = ((r"\.dense_h_to_4h\.", ".up_proj."), (r"\.dense_4h_to_h\.", ".down_proj."))
GRANITE_MOE_NAMES = (
    (r"\.block_sparse_moe\.input_linear\.weight", ".mlp.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.output_linear\.weight", ".mlp.experts.down_proj"),
    (r"\.block_sparse_moe\.router\.(layer\.)?", ".mlp.gate."),
    (r"\.shared_mlp\.input_linear\.", ".mlp.shared_expert.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.shared_expert.down_proj."),
)
GRANITE_MOE_DEFAULTS = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
ROTARY_KEYS = frozenset({"partial_rotary_factor"})
GEMMA_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
GEMMA_2_DEFAULTS = {
    **GEMMA_DEFAULTS,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
SOFTCAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
GLM_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}

MISTRAL = Family(
    model_type="mistral",
    qkv_bias=False,
    output_bias=False,
    windowed="all",
    switches_window=False,
    defaults={
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
        "eos_token_id": 2,
        "bos_token_id": 1,
    },
)

GEMMA_3 = Family(
    model_type="gemma3_text",
    qk_norm=True,
    windowed="pattern",
    switches_window=False,
    parts={"norm_offset": 1.0, "norm_places": "both"},
    has_local_rope=True,
    derive=gemma_3,
    understands=SOFTCAPS,
    activation_key="hidden_activation",
    defaults={
        **GEMMA_2_DEFAULTS,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "sliding_window_pattern": 6,
    },
)

FAMILIES = {
    "LlamaForCausalLM": Family(model_type="llama", defaults={"eos_token_id": 2, "bos_token_id": 1}),
    "MistralForCausalLM": MISTRAL,
    "MinistralForCausalLM": replace(MISTRAL, model_type="ministral"),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        qkv_bias=False,
        output_bias=False,
        windowed="all",
        switches_window=False,
        names_layers=False,
        experts=True,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        qkv_bias=True,
        output_bias=False,
        windowed="late",
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        qk_norm=True,
        windowed="late",
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        qk_norm=True,
        windowed="all",
        names_layers=False,
        experts=True,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        understands=frozenset({"no_rope_layer_interval"}),  # unless `no_rope_layers` names the layers
        windowed="unrotated",
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
            "eos_token_id": 128001,
            "bos_token_id": 128000,
        },
    ),
    "GemmaForCausalLM": Family(
        model_type="gemma",
        parts={"norm_offset": 1.0},
        derive=gemma,
        defaults={**GEMMA_DEFAULTS, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        windowed="even",
        switches_window=False,
        parts={"norm_offset": 1.0, "norm_places": "both"},
        derive=gemma_2,
        understands=SOFTCAPS,
        activation_key="hidden_activation",
        defaults={**GEMMA_2_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": GEMMA_3,
    "Gemma3ForConditionalGeneration": replace(
        GEMMA_3,
        model_type="gemma3",
        has_images=True,
        renames=(
            (r"^(model\.)?language_model\.(model\.)?(?=layers|norm|embed_tokens)", "model."),
            (r"^(model\.)?language_model\.lm_head\.", "lm_head."),
        ),
        defaults={
            **GEMMA_3.defaults,
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
    ),
    "Phi3ForCausalLM": Family(
        model_type="phi3",
        qkv_bias=False,
        output_bias=False,
        windowed="all",
        switches_window=False,
        derive=partial_rotation,
        understands=ROTARY_KEYS,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 32000, "bos_token_id": 1},
    ),
    "Olmo2ForCausalLM": Family(
        model_type="olmo2",
        qk_norm=True,
        parts={"norm_places": "after", "wide_qk_norm": True},
        defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279},
    ),
    "Olmo3ForCausalLM": Family(
        model_type="olmo3",
        qk_norm=True,
        windowed="pattern",
        switches_window=False,
        parts={"norm_places": "after", "wide_qk_norm": True},
        has_local_rope=True,
        derive=olmo_3,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": OLMO_3_THETA,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "eos_token_id": 50279,
        },
    ),
    "GraniteForCausalLM": Family(
        model_type="granite",
        derive=granite,
        defaults={
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
    ),
    "CohereForCausalLM": Family(
        model_type="cohere",
        understands=frozenset({"use_qk_norm"}),
        parts={"norm": "layer", "is_parallel": True, "interleaved_rope": True},
        derive=cohere,
        epsilon_key="layer_norm_eps",
        defaults={
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "eos_token_id": 255001,
            "bos_token_id": 5,
        },
    ),
    "Cohere2ForCausalLM": Family(
        model_type="cohere2",
        windowed="pattern",
        rotates_windows=True,
        switches_window=False,
        parts={"norm": "layer", "is_parallel": True, "interleaved_rope": True},
        derive=cohere,
        epsilon_key="layer_norm_eps",
        defaults={
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
            "eos_token_id": 255001,
            "bos_token_id": 5,
        },
    ),
    "Starcoder2ForCausalLM": Family(
        model_type="starcoder2",
        windowed="all",
        switches_window=False,
        parts={"norm": "layer", "norm_bias": True, "has_gate": False},
        derive=uniform_bias,
        epsilon_key="norm_epsilon",
        renames=((r"\.mlp\.c_fc\.", ".mlp.up_proj."), (r"\.mlp\.c_proj\.", ".mlp.down_proj.")),
        defaults={
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
            "bos_token_id": 50256,
        },
    ),
    "StableLmForCausalLM": Family(
        model_type="stablelm",
        output_bias=False,
        parts={"norm": "layer", "norm_bias": True},
        derive=stablelm,
        understands=ROTARY_KEYS | {"qk_layernorm", "use_parallel_residual"},
        renames=((r"\.self_attn\.(q|k)_layernorm\.", r".self_attn.\1_norm."),),
        epsilon_key="layer_norm_eps",
        defaults={
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "eos_token_id": 0,
            "bos_token_id": 0,
        },
    ),
    "PhiForCausalLM": Family(
        model_type="phi",
        qkv_bias=True,
        output_bias=True,
        parts={
            "norm": "layer",
            "norm_bias": True,
            "is_parallel": True,
            "has_gate": False,
            "mlp_bias": True,
            "head_bias": True,
        },
        derive=partial_rotation,
        understands=ROTARY_KEYS,
        epsilon_key="layer_norm_eps",
        renames=(
            (r"\.mlp\.fc1\.", ".mlp.up_proj."),
            (r"\.mlp\.fc2\.", ".mlp.down_proj."),
            (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            (r"^model\.final_layernorm\.", "model.norm."),
        ),
        defaults={
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.5,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
    ),
    "GlmForCausalLM": Family(
        model_type="glm",
        output_bias=False,
        parts={"interleaved_rope": True},
        derive=partial_rotation,
        understands=ROTARY_KEYS,
        defaults=GLM_DEFAULTS,
    ),
    "Glm4ForCausalLM": Family(
        model_type="glm4",
        output_bias=False,
        parts={"interleaved_rope": True, "norm_places": "both"},
        derive=partial_rotation,
        understands=ROTARY_KEYS,
        renames=(
            (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
            (r"\.post_self_attn_layernorm\.", ".post_attention_layernorm."),
            (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
        ),
        defaults=GLM_DEFAULTS,
    ),
    "SeedOssForCausalLM": Family(
        model_type="seed_oss",
        derive=seed_oss,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "attention_out_bias": False,
            "eos_token_id": 2,
            "bos_token_id": 0,
        },
    ),
    "Ernie4_5ForCausalLM": Family(
        model_type="ernie4_5",
        parts={"interleaved_rope": True},
        derive=uniform_bias,
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "use_bias": False,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
    ),
    "HeliumForCausalLM": Family(
        model_type="helium",
        output_bias=False,
        parts={"interleaved_rope": True},
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "rope_theta": 1e5,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
    ),
    "Exaone4ForCausalLM": Family(
        model_type="exaone4",
        qkv_bias=False,
        output_bias=False,
        qk_norm=True,
        windowed="pattern",
        rotates_windows=True,
        switches_window=False,
        parts={"norm_places": "after"},
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "eos_token_id": 2,
            "bos_token_id": 0,
        },
    ),
    "OlmoForCausalLM": Family(
        model_type="olmo",
        parts={"norm": "layer", "has_norm_weight": False},
        derive=clipped,
        understands=CLIP_KEYS,
        epsilon_key="norm_eps",  # which no file has
        defaults={"norm_eps": 1e-5, "eos_token_id": 50279},
    ),
    "OlmoeForCausalLM": Family(
        model_type="olmoe",
        qk_norm=True,
        experts=True,
        parts={"wide_qk_norm": True},
        derive=clipped,
        understands=CLIP_KEYS,
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "eos_token_id": 50279,
        },
    ),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe",
        output_bias=False,
        windowed="late",
        experts=True,
        derive=qwen_2_moe,
        defaults={
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
            "qkv_bias": True,
        },
    ),
    "GraniteMoeForCausalLM": Family(
        model_type="granitemoe",
        experts=True,
        derive=granite,
        renames=GRANITE_MOE_NAMES,
        defaults=GRANITE_MOE_DEFAULTS,
    ),
    "GraniteMoeSharedForCausalLM": Family(
        model_type="granitemoeshared",
        experts=True,
        derive=granite_moe_shared,
        renames=GRANITE_MOE_NAMES,
        defaults={**GRANITE_MOE_DEFAULTS, "shared_intermediate_size": 0},
    ),
    "Glm4MoeForCausalLM": Family(
        model_type="glm4_moe",
        output_bias=False,
        experts=True,
        parts={"has_sigmoid_router": True},
        derive=glm_4_moe,
        understands=ROTARY_KEYS | {"use_qk_norm", "num_mtp_layers"},  # layers for further tokens are not used
        aliases={"n_routed_experts": "num_experts"},
        renames=(
            (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.score_bias"),
            (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
        ),
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1408,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        windowed="even",
        switches_window=False,
        experts=True,
        parts={
            "has_sinks": True,
            "expert_bias": True,
            "interleaved_gates": True,
            "transposed": r"\.experts\.(gate_up|down)_proj$",
        },
        derive=gpt_oss,
        understands=frozenset({"experts_per_token", "initial_context_length", "swiglu_limit"}),
        renames=((r"\.mlp\.router\.", ".mlp.gate."),),
        dequantizes=("mxfp4",),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "NemotronForCausalLM": Family(
        model_type="nemotron",
        parts={"norm": "layer", "norm_bias": True, "norm_offset": 1.0, "has_gate": False},
        derive=partial_rotation,
        understands=ROTARY_KEYS,
        epsilon_key="norm_eps",
        defaults={
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "eos_token_id": 3,
            "bos_token_id": 2,
        },
    ),
    "GPT2LMHeadModel": Family(
        model_type="gpt2",
        has_kv_heads=False,
        qkv_bias=True,
        output_bias=True,
        is_rotated=False,
        mlp_ratio=4,
        parts={
            **PLAIN_PARTS,
            "mlp_bias": True,
            "learned_positions": True,
            "transposed": r"\.(qkv|o|up|down)_proj\.weight$",
        },
        understands=frozenset({"n_ctx"}),
        supported={
            "scale_attn_weights": (None, True),
            "scale_attn_by_inverse_layer_idx": (None, False),
            "reorder_and_upcast_attn": (None, False, True),  # a matter of rounding
        },
        epsilon_key="layer_norm_epsilon",
        activation_key="activation_function",
        aliases=GPT_ALIASES,
        renames=GPT_2_NAMES,
        defaults={
            "max_position_embeddings": 1024,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
            "bos_token_id": 50256,
        },
    ),
    "GPTJForCausalLM": Family(
        model_type="gptj",
        has_kv_heads=False,
        qkv_bias=False,
        output_bias=False,
        mlp_ratio=4,
        parts={**PLAIN_PARTS, "mlp_bias": True, "head_bias": True, "is_parallel": True, "interleaved_rope": True},
        derive=gpt_j,
        understands=frozenset({"n_ctx", "rotary", "scale_attn_weights"}),
        epsilon_key="layer_norm_epsilon",
        activation_key="activation_function",
        aliases=GPT_ALIASES,
        renames=(
            *GPT_2_NAMES,
            (r"\.attn\.(q|k|v)_proj\.", r".self_attn.\1_proj."),
            (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.mlp\.fc_in\.", ".mlp.up_proj."),
            (r"\.mlp\.fc_out\.", ".mlp.down_proj."),
        ),
        defaults={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "rotary_dim": 64,
            "eos_token_id": 50256,
            "bos_token_id": 50256,
        },
    ),
    "GPTNeoXForCausalLM": Family(
        model_type="gpt_neox",
        has_kv_heads=False,
        parts={**PLAIN_PARTS, "mlp_bias": True, "grouped_qkv": True},
        derive=gpt_neox,
        understands=ROTARY_KEYS | {"use_parallel_residual"},
        epsilon_key="layer_norm_eps",
        aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        renames=(
            (r"^gpt_neox\.", "model."),
            (r"^model\.embed_in\.", "model.embed_tokens."),
            (r"^embed_out\.", "lm_head."),
            (r"^model\.final_layer_norm\.", "model.norm."),
            (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.attention\.dense\.", ".self_attn.o_proj."),
            *DENSE_NAMES,
        ),
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
            "eos_token_id": 2,
            "bos_token_id": 0,
        },
    ),
    "FalconForCausalLM": Family(
        model_type="falcon",
        has_kv_heads=False,
        qkv_bias=False,
        output_bias=False,
        mlp_ratio=4,
        parts={**PLAIN_PARTS, "grouped_qkv": True},
        derive=falcon,
        understands=frozenset({"multi_query", "parallel_attn", "num_kv_heads"}),  # without effect in some generations
        epsilon_key="layer_norm_epsilon",
        activation_key="activation",
        aliases={
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "n_head_kv": "num_kv_heads",
            "ffn_hidden_size": "intermediate_size",
        },
        renames=(
            (r"^transformer\.word_embeddings\.", "model.embed_tokens."),
            (r"^transformer\.h\.", "model.layers."),
            (r"^transformer\.ln_f\.", "model.norm."),
            (r"\.ln_attn\.", ".input_layernorm."),
            (r"\.ln_mlp\.", ".post_attention_layernorm."),
            (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
            *DENSE_NAMES,
        ),
        defaults={
            "activation": "gelu",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "multi_query": True,
            "parallel_attn": True,
            "eos_token_id": 11,
            "bos_token_id": 11,
        },
    ),
    "OPTForCausalLM": Family(
        model_type="opt",
        has_kv_heads=False,
        is_rotated=False,
        parts={**PLAIN_PARTS, "learned_positions": True, "position_offset": 2},
        derive=opt,
        supported={
            "do_layer_norm_before": (None, True),
            "_remove_final_layer_norm": (None, False),
            "layer_norm_elementwise_affine": (None, True),
        },
        epsilon_key="layer_norm_eps",
        activation_key="activation_function",
        aliases={"ffn_dim": "intermediate_size"},
        renames=(
            (r"^(model\.)?decoder\.", "model."),
            (r"^model\.final_layer_norm\.", "model.norm."),
            (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.self_attn_layer_norm\.", ".input_layernorm."),
            (r"\.final_layer_norm\.", ".post_attention_layernorm."),
            (r"\.fc1\.", ".mlp.up_proj."),
            (r"\.fc2\.", ".mlp.down_proj."),
        ),
        defaults={
            "activation_function": "relu",
            "layer_norm_eps": 1e-5,
            "enable_bias": True,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "bos_token_id": 2,
        },
    ),
    "BloomForCausalLM": Family(
        model_type="bloom",
        has_kv_heads=False,
        qkv_bias=True,
        output_bias=True,
        is_rotated=False,
        mlp_ratio=4,
        parts={
            **PLAIN_PARTS,
            "mlp_bias": True,
            "activation": "gelu_tanh",
            "has_alibi": True,
            "embedding_norm": True,
            "grouped_qkv": True,
        },
        understands=frozenset({"slow_but_exact", "offset_alibi", "masked_softmax_fusion", "bias_dropout_fusion"}),
        supported={
            "apply_residual_connection_post_layernorm": (None, False),
            "attention_softmax_in_fp32": (None, True, False),  # a matter of rounding
        },
        epsilon_key="layer_norm_epsilon",
        aliases={
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_embed": "hidden_size",
            "seq_length": "max_position_embeddings",
        },
        renames=(
            (r"^(?=h\.|word_embeddings|ln_f\.)", "transformer."),
            (r"^transformer\.word_embeddings\.", "model.embed_tokens."),
            (r"^transformer\.word_embeddings_layernorm\.", "model.embed_norm."),
            (r"^transformer\.h\.", "model.layers."),
            (r"^transformer\.ln_f\.", "model.norm."),
            (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
            (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
            *DENSE_NAMES,
        ),
        defaults={
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
    ),
    "MptForCausalLM": Family(
        model_type="mpt",
        has_kv_heads=False,
        qkv_bias=False,
        output_bias=False,
        is_rotated=False,
        parts={
            "norm": "layer",
            "has_gate": False,
            "activation": "gelu",
            "has_alibi": True,
        },
        derive=mpt,
        supported={"no_bias": (None, True), "logit_scale": (None,), "norm_type": (None, "low_precision_layernorm")},
        understands=frozenset({"learned_pos_emb", "init_device", "embedding_fraction", "verbose", "init_config"}),
        epsilon_key="layer_norm_epsilon",
        aliases={
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
        },
        mlp_ratio=4,
        renames=(
            (r"^transformer\.wte\.", "model.embed_tokens."),
            (r"^transformer\.blocks\.", "model.layers."),
            (r"^transformer\.norm_f\.", "model.norm."),
            (r"\.norm_1\.", ".input_layernorm."),
            (r"\.norm_2\.", ".post_attention_layernorm."),
            (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
            (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
            (r"\.ffn\.", ".mlp."),
        ),
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "expansion_ratio": 4, "attn_config": {}},
    ),
}


def family_of(config: Config) -> Family:
    """The family named by `architectures`, else by `model_type`."""
    names = config.get("architectures")
    if names:
        names = [str(name) for name in names] if isinstance(names, list) else [str(names)]
        found = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    else:
        found = next((f for f in FAMILIES.values() if f.model_type == config.get("model_type")), None)
    if found is None:
        what = " and ".join(names) if names else f"model_type {config.get('model_type')!r}"
        raise CheckpointError(f"{what} is not supported; supported are {', '.join(FAMILIES)}")
    return found
