"""Llama 4: attention in chunks, layers without positions, experts whose inputs are weighed."""

from __future__ import annotations

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import LLAMA_TOKENS
from flambeau.llm.models.families.family import Config, Family

LAYER_TYPES = ("full_attention", "chunked_attention")


def llama_4(config: Config) -> Config:
    layers, size = range(config["num_hidden_layers"]), int(config["intermediate_size"])
    unrotated = unrotated_layers(config)
    step, sparse = int(config["interleave_moe_layer_step"]), config.get("moe_layers")
    sparse = range(step - 1, len(layers), step) if sparse is None else sparse
    is_tempered = bool(config["attn_temperature_tuning"])
    return {
        "unrotated_layers": unrotated,
        "chunks": chunks(config, unrotated),
        "rotated_qk_norm": bool(config["use_qk_norm"]),
        "temperature_length": int(config["floor_scale"]) if is_tempered else 0,
        "temperature_scale": float(config["attn_scale"]) if is_tempered else 0.0,
        "dense_layers": frozenset(layers) - frozenset(sparse),
        "expert_size": size,
        "shared_expert_size": size,
        "intermediate_size": int(config["intermediate_size_mlp"]),
    }


def unrotated_layers(config: Config) -> frozenset[int]:
    """The layers without positions; `no_rope_layers` has 1 for those with them."""
    layers, named, every = (
        range(config["num_hidden_layers"]),
        config.get("no_rope_layers"),
        config["no_rope_layer_interval"],
    )
    if named:
        return frozenset(i for i, is_rotated in zip(layers, named, strict=False) if not is_rotated)
    return frozenset(i for i in layers if (i + 1) % every == 0)


def chunks(config: Config, unrotated: frozenset[int]) -> tuple[int | None, ...]:
    """The tokens of a chunk in each layer; empty if no sequence has more than one."""
    layers, size, named = (
        range(config["num_hidden_layers"]),
        config.get("attention_chunk_size"),
        config.get("layer_types"),
    )
    named = named or ["full_attention" if i in unrotated else "chunked_attention" for i in layers]
    if len(named) != len(layers) or not set(named) <= set(LAYER_TYPES):
        raise CheckpointError(f"layer_types must name {len(layers)} layers, each one of {', '.join(LAYER_TYPES)}")
    if size is None or size >= config["max_position_embeddings"]:
        return ()
    return tuple(int(size) if kind == "chunked_attention" else None for kind in named)


TEXT = Family(
    model_type="llama4_text",
    experts=True,
    parts={
        "interleaved_rope": True,
        "router": "sigmoid",
        "scales_expert_inputs": True,
        "transposed": r"\.experts\.(gate_up|down)_proj$",
    },
    derive=llama_4,
    understands=frozenset({"use_qk_norm", "for_llm_compressor", "floor_scale", "attn_scale"}),
    supported={"norm_topk_prob": (None, False)},
    renames=((r"\.feed_forward\.router\.", ".mlp.gate."),),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "intermediate_size_mlp": 16384,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        **LLAMA_TOKENS,
    },
)

LLAMA_4 = {"Llama4ForCausalLM": TEXT}
