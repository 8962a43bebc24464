"""Families with Kimi's delta attention (KDA) between layers with latent attention: Kimi Linear, Ling 3."""

from __future__ import annotations

from collections.abc import Iterable

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import dense_layers, expert_groups
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.latent import (
    ALIASES,
    DEEPSEEK_DEFAULTS,
    DEEPSEEK_NAMES,
    DERIVED_KEYS,
    latent_attention,
)
from flambeau.llm.models.families.layer_types import SILU, named_layers
from flambeau.llm.models.families.recurrence import Recurrence

LINEAR_KEYS = frozenset({"head_dim", "num_heads", "short_conv_kernel_size", "full_attn_layers", "kda_layers"})
MIXER_NAMES = (  # of layers whose tensors are named like those of attention
    (r"\.mixer\.forget_gate\.", ".mixer."),
    (r"\.mixer\.([qkvb])_proj\.", r".mixer.in_proj_\1."),
    (r"\.mixer\.o_(proj|norm)\.", r".mixer.out_\1."),
    (r"\.mixer\.out_norm\.", ".mixer.norm."),
)


def mixer_names(layers: Iterable[int]) -> tuple[tuple[str, str], ...]:
    """Renames for recurrent layers whose tensors are named like those of attention."""
    numbers = "|".join(map(str, sorted(layers)))
    return ((rf"^(model\.layers\.(?:{numbers})\.)self_attn\.", r"\1mixer."),)


def kimi_linear(config: Config) -> Config:
    """Sizes of delta attention are in a section of published files, and at the top in those of transformers."""
    section = config.get("linear_attn_config") or {}
    if unknown := sorted(section.keys() - LINEAR_KEYS):
        raise CheckpointError(f"linear_attn_config has {', '.join(unknown)}, which is not supported")
    num_layers, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None and "kda_layers" in section and "full_attn_layers" in section:
        recurrent, attending = set(section["kda_layers"]), set(section["full_attn_layers"])  # counted from 1
        if recurrent & attending or recurrent | attending != set(range(1, num_layers + 1)):
            raise CheckpointError(f"kda_layers and full_attn_layers must name each of {num_layers} layers once")
        types = ["linear_attention" if i + 1 in recurrent else "full_attention" for i in range(num_layers)]
    if types is None:
        types = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(num_layers)]
    size = int(section.get("head_dim") or config["linear_head_dim"])
    layers = named_layers(types, num_layers)
    return delta_attention(
        config,
        layers=layers,
        num_heads=int(section.get("num_heads") or config["linear_num_heads"]),
        size=size,
        conv_width=int(section.get("short_conv_kernel_size") or config["linear_conv_kernel_dim"]),
        gate_rank=size,
    )


def delta_attention(
    config: Config,
    *,
    layers: frozenset[int],
    num_heads: int,
    size: int,
    conv_width: int,
    gate_rank: int = 0,
    lowest_log_decay: float | None = None,
) -> Config:
    """The parts of a network with delta attention in these layers, latent attention in the others, and experts."""
    recurrence = Recurrence(
        kind="kimi_delta",
        layers=layers,
        inner_size=num_heads * size,
        conv_width=conv_width,
        conv_bias=False,
        num_heads=num_heads,
        head_size=size,
        state_size=size,
        num_groups=num_heads,
        gate_rank=gate_rank,
        lowest_log_decay=lowest_log_decay,
    )
    return {
        **latent_attention(config),
        **expert_groups(config),
        "recurrence": recurrence,
        "shared_expert_size": int(config.get("n_shared_experts") or 0) * int(config["moe_intermediate_size"]),
        "routed_scale": float(config["routed_scaling_factor"]),
        "dense_layers": dense_layers(config, int(config["first_k_dense_replace"])),
        "num_unused_layers": int(config.get("num_nextn_predict_layers") or 0),
    }


def kimi(config: Config) -> Config:
    parts = kimi_linear(config)
    names = ((r"\.block_sparse_moe\.", ".mlp."), *DEEPSEEK_NAMES, *mixer_names(parts["recurrence"].layers))
    # Without positions, nothing is sharpened where positions are scaled.
    scale = (parts["unrotated_size"] + parts["rotary_size"]) ** -0.5
    return {**parts, "attention_scale": scale, "renames": (*names, *MIXER_NAMES)}


def ling_3(config: Config) -> Config:
    """Every so many layers one has latent attention, with a gate for each head."""
    num_layers, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:
        every = int(config["layer_group_size"])
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    layers = named_layers(types, num_layers)
    has_limit = bool(config["kda_safe_gate"])
    parts = delta_attention(
        config,
        layers=layers,
        num_heads=config["num_attention_heads"],
        size=int(config.get("linear_head_dim") or config["linear_head_size"]),
        conv_width=int(config["short_conv_kernel_size"]),
        lowest_log_decay=float(config["kda_lower_bound"]) if has_limit else None,
    )
    if config.get("q_lora_rank"):
        raise CheckpointError("q_lora_rank is not supported for this family")
    names = (*LING_NAMES, *DEEPSEEK_NAMES, *mixer_names(layers), *MIXER_NAMES)
    return {**parts, "renames": (*names, (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."))}


LING_NAMES = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.", ".self_attn."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
)
EXPERT_ALIASES = {
    "num_experts_per_token": "num_experts_per_tok",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_shared_experts": "n_shared_experts",
    "num_local_experts": "num_experts",
    "model_max_length": "max_position_embeddings",
}
# Published files have the size of heads of recurrent layers as head_dim. Those of transformers have it as
# linear_head_dim, and as head_dim the rotated part of other layers, whatever the first file said.
LINEAR_SIZE = {"head_dim": "linear_head_size"}
KIMI_DELTA = {
    "KimiLinearForCausalLM": Family(
        model_type="kimi_linear",
        has_kv_heads=False,
        is_rotated=False,
        experts=True,
        parts={"router": "biased_sigmoid"},
        derive=kimi,
        understands=DERIVED_KEYS
        | {"head_dim", "rope_theta", "linear_head_dim", "linear_num_heads"}
        | {"linear_conv_kernel_dim", "layer_types", "mlp_layer_types", "first_k_dense_replace"},
        supported={
            "hidden_act": SILU,
            "mla_use_nope": (None, True),
            "moe_router_activation_func": (None, "sigmoid"),
            "moe_layer_freq": (None, 1),
            "use_grouped_topk": (None, True),
            "topk_method": (None, "noaux_tc"),
            "rope_scaling": (None,),
        },
        aliases={**ALIASES, **EXPERT_ALIASES},
        defaults={
            **DEEPSEEK_DEFAULTS,
            "q_lora_rank": None,
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-5,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.446,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
            "eos_token_id": 163586,
            "bos_token_id": 163584,
        },
    ),
    "BailingHybridForCausalLM": Family(
        model_type="bailing_hybrid",
        has_kv_heads=False,
        experts=True,
        parts={"router": "biased_sigmoid", "paired_rope": True, "gates_heads": True},
        derive=ling_3,
        understands=DERIVED_KEYS
        | {"layer_types", "mlp_layer_types", "layer_group_size", "mtp_loss_scaling_factor"}
        | {"linear_num_heads", "linear_conv_kernel_dim", "linear_head_size", "kda_lower_bound"},
        supported={
            "hidden_act": SILU,
            "topk_method": (None, "noaux_tc"),
            "scoring_func": (None, "sigmoid"),
            "score_function": (None, "sigmoid"),
            "rope_interleave": (None, True),
            "moe_router_enable_expert_bias": (None, True),
            "use_bias": (None, False),
            "use_qkv_bias": (None, False),
        },
        aliases={**ALIASES, **EXPERT_ALIASES, **LINEAR_SIZE},
        defaults={
            **DEEPSEEK_DEFAULTS,
            "q_lora_rank": None,
            "max_position_embeddings": 262144,
            "rope_theta": 6e6,
            "num_experts": 512,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "moe_intermediate_size": 768,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 2,
            "num_nextn_predict_layers": 1,
            "norm_topk_prob": True,
            "linear_head_size": 128,
            "short_conv_kernel_size": 4,
            "layer_group_size": 6,
            "kda_safe_gate": True,
            "kda_lower_bound": -5.0,
            "eos_token_id": 156895,
        },
    ),
}
