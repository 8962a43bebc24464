"""Mistral Large 4: sparse attention to latents that layers share; heads scale their queries by their positions."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import dense_layers, text_only
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.indexer_shape import IndexerShape
from flambeau.llm.models.families.latent import DEEPSEEK_ALIASES, DEEPSEEK_NAMES, DERIVED_KEYS, latent_attention
from flambeau.llm.models.families.layer_sizes import LayerSizes
from flambeau.llm.models.families.sparse_latent import check_types, reusing_layers


def mistral_large_4(config: Config) -> Config:
    check_types(config)
    parts = latent_attention(config)
    count, rotary, latent = config["num_hidden_layers"], parts["rotary_size"], parts["latent_size"]
    rotated = rotated_layers(config)
    indexer = IndexerShape(
        num_heads=int(config["index_n_heads"]),
        head_size=int(config["index_head_dim"]),
        num_chosen=int(config["index_topk"]),
        paired_rope=True,
        reads_inputs=True,
        reusing_layers=reusing_layers(config),
    )
    if indexer.head_size < rotary:
        raise CheckpointError(f"index_head_dim {indexer.head_size} is less than the rotated part of a head")
    return {
        **parts,
        "paired_rope": True,
        "latent_epsilon": float(config["rms_norm_eps"]),
        "shapes": tuple(
            LayerSizes(
                num_heads=config["num_attention_heads"],
                num_kv_heads=1,
                head_size=latent + rotary if number in rotated else latent,
                intermediate_size=config["intermediate_size"],
                rotary_size=rotary if number in rotated else 0,
            )
            for number in range(count)
        ),
        "shared_keys": sources(config, rotated),
        "indexer": indexer,
        "logit_softcap": float(config["final_logit_softcapping"]),
        "shared_expert_size": int(config["n_shared_experts"]) * int(config["moe_intermediate_size"]),
        "routed_scale": float(config["routed_scaling_factor"]),
        "dense_layers": dense_layers(config, int(config["first_k_dense_replace"])),
    }


def rotated_layers(config: Config) -> frozenset[int]:
    """Despite its name, `no_rope_layers` has 1 for layers with rotary positions."""
    count, given = config["num_hidden_layers"], config.get("no_rope_layers")
    every = int(config["no_rope_layer_interval"])
    flags = [(number + 1) % every for number in range(count)] if given is None else given
    if len(flags) < count:
        raise CheckpointError(f"no_rope_layers must name {count} layers")
    found = frozenset(number for number in range(count) if flags[number])
    if not found:
        raise CheckpointError("no_rope_layers without any layer that is rotated is not supported")
    return found


def sources(config: Config, rotated: frozenset[int]) -> tuple[int, ...]:
    """The layer whose latents each one reads; empty: its own."""
    count, given = config["num_hidden_layers"], config.get("kv_source_layers")
    if given is None:
        return ()
    if len(given) != count:
        raise CheckpointError(f"kv_source_layers must name {count} layers")
    last: dict[bool, int] = {}  # the last layer of each kind that others read
    for layer, source in enumerate(given):
        if not 0 <= source <= layer or given[source] != source:
            raise CheckpointError(f"kv_source_layers: layer {layer} cannot read latents of layer {source}")
        if (source in rotated) != (layer in rotated):
            raise CheckpointError(f"kv_source_layers: layers {source} and {layer} must both be rotated, or neither")
        if source == layer and layer in given[layer + 1 :]:
            last[layer in rotated] = layer
        elif source != layer and last[layer in rotated] != source:  # transformers would read the last one
            raise CheckpointError(f"kv_source_layers: layer {layer} must read the last layer before it that is shared")
    return () if [*given] == [*range(count)] else tuple(given)


MISTRAL_LARGE_4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}
MISTRAL_LARGE_4_TEXT = Family(
    model_type="mistral_large4_text",
    has_kv_heads=False,
    experts=True,
    parts={
        "router": "grouped_softmax",
        "normalizes_experts": True,
        "position_scales": True,
        "learned_rope": True,
        "unused": r"^mtp_dspark\.",
    },
    derive=mistral_large_4,
    understands=DERIVED_KEYS
    | {"layer_types", "no_rope_layers", "no_rope_layer_interval", "kv_source_layers", "final_logit_softcapping"}
    | {"index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"},
    supported={"n_group": (None, 1), "topk_group": (None, 1), "q_lora_rank": (None,), "norm_topk_prob": (None, True)},
    aliases=DEEPSEEK_ALIASES,
    renames=(
        (r"^(layers\.)", r"model.\1"),
        (r"^(lerope|model\.rotary_emb)\.alpha$", "rotation.alpha"),
        (r"(\.layers\.\d+)\.(gate|experts|shared_experts)\.", r"\1.mlp.\2."),
        (r"\.attention\.(?=wq\.|wo\.|wkv|kv_a_norm|ssmax|indexer)", ".self_attn."),
        (r"\.self_attn\.wq\.", ".self_attn.q_proj."),
        (r"\.self_attn\.wo\.", ".self_attn.o_proj."),
        (r"\.wkv_a_with_mqa\.", ".kv_a_proj_with_mqa."),
        (r"\.wkv_b\.", ".kv_b_proj."),
        (r"\.kv_a_norm\.", ".kv_a_layernorm."),
        (r"\.(ssmax_scaling\.s|softmax_scaling\.scale)$", ".position_scale.weight"),
        (r"\.(ssmax_scaling\.b|softmax_scaling\.bias)$", ".position_scale.bias"),
        *DEEPSEEK_NAMES,
    ),
    defaults={
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "moe_intermediate_size": 6144,
        "num_hidden_layers": 72,
        "num_attention_heads": 64,
        "vocab_size": 204800,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 512,
        "head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 64,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "rope_parameters": MISTRAL_LARGE_4_ROPE,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_skip_topk_offset": 2,
        "first_k_dense_replace": 1,
        "no_rope_layer_interval": 4,
        "final_logit_softcapping": 30.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
MISTRAL_LARGE_4 = {
    "MistralLarge4ForConditionalGeneration": replace(text_only(MISTRAL_LARGE_4_TEXT), model_type="mistral_large4"),
}
