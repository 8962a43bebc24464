"""Parts of an architecture that several families read from config.json."""

from __future__ import annotations

import math
from dataclasses import replace

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.family import Config, Family

LLAMA_TOKENS = {"eos_token_id": 2, "bos_token_id": 1}
GPT_TOKENS = {"eos_token_id": 50256, "bos_token_id": 50256}
DEEPSEEK_EXPERT_NAMES = (
    (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.score_bias"),
    (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
)
ROTARY_KEYS = frozenset({"partial_rotary_factor"})
_HUNYUAN_KEYS = """
alpha eod_token_id attention_head_dim org_vocab_size cla_share_factor use_rotary_pos_emb add_classification_head
anyres_pooling_size class_num dense_list im_start_id im_end_id im_newline_id pad_id pool_type text_start_id text_end_id
video_start_id video_end_id mask_init_id moe_drop_tokens moe_random_routing_dropped_token capacity_factor
"""
HUNYUAN_KEYS = frozenset(_HUNYUAN_KEYS.split())  # `alpha` is a rope parameter; the others have no effect
_HUNYUAN_MOE_KEYS = """
n_group topk_group num_media_embeds skip_cls_token anyres_vit_two_views vit_add_patchemb_bias vit_input_resolution
vit_mapping_type vit_norm_type vit_patch vit_remove_prenorm vit_token vit_used_rms_norm
"""
HUNYUAN_MOE_KEYS = frozenset(_HUNYUAN_MOE_KEYS.split())  # of groups without group_limited_greedy, and of images
HUNYUAN_NAMES = (
    (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
)
HUNYUAN_SUPPORTED = {
    "use_qk_norm": (None, True),
    "use_cla": (None, False),
    "norm_type": (None, "hf_rms", "rms"),
    "group_limited_greedy": (None, False),
    "routed_scaling_factor": (None, False, 1.0),
    "moe_layer_num_skipped": (None, 0),
    "use_mixed_mlp_moe": (None, False, True),
}
VISION = (  # tensors of pictures and sounds
    r"^(thinker\.)?(model\.)?(vision_model|vision_tower|visual|multi_modal_projector|mm_projector|connector|image_newline|"
    r"vision_embedder|embed_vision|vision_encoder|vision_projection|vision_projector|visual_embeddings_table|projector|"
    r"layerwise_projectors|spatial_projectors|mlp1|mlp_AR|merger|vit_merger|view_seperator|view_separator|sam_model|"
    r"qwen2_model|vit_large_projector|patch_merge_mlp|pre_mm_projector_norm|patch_merger|vision_language_adapter|"
    r"audio_tower|embed_audio|audio_encoder|audio_adapter|aligner|high_res_vision_\w+|vision_resampler|density_router|"
    r"vision_final_layernorm|sound_encoder|sound_projection)\b"
)
OUTPUTS = (  # tensors of what speaks or paints
    r"^(talker|token2wav|code2wav)\.|^(model\.)?(vqmodel|generation_embeddings|generation_aligner|generation_head)\b"
)
TEXT_NAMES = ((r"^thinker\.", ""), (r"^language_model\.", ""), (r"^model\.(language|text)_model\.", "model."))
CLIP_KEYS = frozenset({"clip_qkv"})


def partial_rotation(config: Config) -> Config:
    """`partial_rotary_factor`, at the top level or among the rope parameters; rope_scaling replaces all of these."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    given = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    factor = 1.0 if given is None else given
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    size = int(head_size * factor)
    return {} if size == head_size else {"rotary_size": size}


def expert_groups(config: Config) -> Config:
    """Experts are chosen from the best `topk_group` of `n_group` groups."""
    found = {key: 1 if config.get(key) is None else config[key] for key in ("n_group", "topk_group")}
    for key, number in found.items():
        if not isinstance(number, int) or not 1 <= number <= found["n_group"]:
            raise CheckpointError(f"{key} {number!r} is not supported; it must be a number from 1 up to n_group")
    return {"num_expert_groups": found["n_group"], "num_chosen_groups": found["topk_group"]}


def dense_layers(config: Config, num_dense: int) -> frozenset[int]:
    """The layers without experts: `mlp_layer_types` names them, or they are the first ones."""
    num_layers, kinds = config["num_hidden_layers"], config.get("mlp_layer_types")
    if kinds is None:
        return frozenset(range(num_dense))
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise CheckpointError("mlp_layer_types must name all layers, each one of dense, sparse")
    return frozenset(number for number, kind in enumerate(kinds) if kind == "dense")


def stretched_theta(config: Config) -> Config:
    """Hunyuan's `alpha` stretches theta, whatever the length; its files call that dynamic."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    alpha, kind = parameters.get("alpha"), parameters.get("rope_type") or parameters.get("type")
    if not alpha or kind != "dynamic":
        return {}
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"rope_theta": float(theta * alpha ** (size / (size - 2)))}


def text_only(family: Family) -> Family:
    """The same family in checkpoints that also hold a vision model, which is no part of its network."""
    unused = "|".join(filter(None, (VISION, OUTPUTS, family.parts.get("unused"))))
    return replace(
        family,
        text_section="text_config",
        parts={**family.parts, "unused": unused},
        renames=(*TEXT_NAMES, *family.renames),
    )


def minicpm_scales(config: Config) -> Config:
    """Factors of embeddings, of what layers add, and of logits."""
    depth, base = config.get("scale_depth"), config.get("dim_model_base")
    return {
        "embedding_scale": float(config["scale_emb"]),
        "residual_scale": 1.0 if depth is None else depth / math.sqrt(config["num_hidden_layers"]),
        "logit_scale": 1.0 if base is None else base / config["hidden_size"],
    }


def granite(config: Config) -> Config:
    return {
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "attention_scale": float(config["attention_multiplier"]),
        "logit_scale": 1.0 / config["logits_scaling"],
    }


def uniform_bias(config: Config) -> Config:
    """`use_bias`: all layers have one, or none."""
    has_bias = bool(config["use_bias"])
    return {"qkv_bias": has_bias, "output_bias": has_bias, "mlp_bias": has_bias}


def growing_queries(config: Config) -> Config:
    """Queries grow with their position, as Llama 4's do (Ministral 3)."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    beta = parameters.get("llama_4_scaling_beta")
    if not beta:
        return {}
    length = parameters.get("original_max_position_embeddings")
    if not length:
        raise CheckpointError("llama_4_scaling_beta needs original_max_position_embeddings among the rope parameters")
    return {"tempers_rotated": True, "temperature_length": int(length), "temperature_scale": float(beta)}


def clipped(config: Config) -> Config:
    return {"clip_qkv": config.get("clip_qkv")}
