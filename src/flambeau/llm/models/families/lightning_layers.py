"""Families with lightning attention, whose states decay by a constant of each head: MiniMax 01 and M1."""

from __future__ import annotations

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.kimi_delta import mixer_names
from flambeau.llm.models.families.layer_types import SILU, named_layers
from flambeau.llm.models.families.recurrence import Recurrence

NORM_EPSILON = 1e-6  # of the norm of outputs, whatever config.json says of the others


def minimax(config: Config) -> Config:
    num_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    types = config.get("layer_types")
    if types is None and config.get("attn_type_list") is not None:
        types = ["full_attention" if is_full else "linear_attention" for is_full in config["attn_type_list"]]
    if types is None:
        types = ["linear_attention" if i % 2 else "full_attention" for i in range(num_layers)]
    layers = named_layers(types, num_layers)
    size = int(config.get("head_dim") or config["hidden_size"] // heads)
    recurrence = Recurrence(
        kind="lightning",
        layers=layers,
        inner_size=heads * size,
        conv_width=1,
        conv_bias=False,
        num_heads=heads,
        head_size=size,
        state_size=size,
        num_groups=heads,
        inner_epsilon=NORM_EPSILON,
        slope_factors=slope_factors(num_layers, 0),
        activates_inputs=True,
    )
    scales = tuple(
        (float(config[f"{part}_alpha_factor"]), float(config[f"{part}_beta_factor"]))
        for part in ("full_attn", "linear_attn", "mlp")
    )
    rotated = int(config.get("rotary_dim") or size)
    return {
        "recurrence": recurrence,
        "stream_scales": scales,
        "renames": (*mixer_names(layers), *LIGHTNING_NAMES),
        **({} if rotated == size else {"rotary_size": rotated}),
    }


def slope_factors(num_layers: int, first: int) -> tuple[float, ...]:
    """States of later layers decay more slowly."""
    if num_layers < 2:
        raise CheckpointError("num_hidden_layers must be 2 or more: decays fall from the first layer to the last")
    return tuple(1 - (layer + first) / (num_layers - 1) + 1e-5 for layer in range(num_layers))


LIGHTNING_NAMES = (
    (r"\.mixer\.qkv_proj\.", ".mixer.in_proj_qkv."),
    (r"\.mixer\.output_gate\.", ".mixer.in_proj_z."),
)
MINIMAX = Family(
    model_type="minimax",
    qkv_bias=False,
    output_bias=False,
    experts=True,
    parts={"norm_places": "stream"},
    derive=minimax,
    understands=frozenset({"layer_types", "attn_type_list", "block_size", "rotary_dim", "shared_moe_mode"}),
    supported={
        "hidden_act": SILU,
        "postnorm": (None, True),
        "shared_intermediate_size": (None, 0),
        "sliding_window": (None,),
        "router_jitter_noise": (None, 0.0, 0),
    },
    aliases={
        f"layernorm_{given}_{factor}": f"{own}_{factor}_factor"
        for given, own in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
        for factor in ("alpha", "beta")
    },
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "full_attn_alpha_factor": 1.0,
        "full_attn_beta_factor": 1.0,
        "linear_attn_alpha_factor": 1.0,
        "linear_attn_beta_factor": 1.0,
        "mlp_alpha_factor": 1.0,
        "mlp_beta_factor": 1.0,
        "eos_token_id": 2,
        "bos_token_id": 1,
    },
)
LIGHTNING = {
    "MiniMaxForCausalLM": MINIMAX,
    "MiniMaxText01ForCausalLM": MINIMAX,
    "MiniMaxM1ForCausalLM": MINIMAX,
}
