"""RWKV 4: recurrent layers whose state is a weighted mean of values."""

from __future__ import annotations

from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.recurrence import Recurrence


def rwkv_4(config: Config) -> Config:
    hidden = config["hidden_size"]
    return {
        "recurrence": Recurrence(
            kind="rwkv",
            layers=frozenset(range(2 * config["num_hidden_layers"])),  # of time mixing, then of channel mixing
            inner_size=int(config.get("attention_hidden_size") or hidden),
            state_size=hidden,
        ),
    }


RWKV = {
    "RwkvForCausalLM": Family(
        model_type="rwkv",
        supported={"layer_norm_epsilon": (None, 1e-5)},
        mlp_ratio=4,
        parts={"norm": "layer", "norm_bias": True, "embedding_norm": True, "has_gate": False},
        derive=rwkv_4,
        understands=frozenset(
            {"rescale_every"}
        ),  # halves hidden states against overflow, which norms undo but for epsilon
        epsilon_key="layer_norm_epsilon",
        aliases={"context_length": "max_position_embeddings"},
        renames=(
            (r"^rwkv\.embeddings\.", "model.embed_tokens."),
            (r"^rwkv\.ln_out\.", "model.norm."),
            (r"^rwkv\.blocks\.0\.pre_ln\.", "model.embed_norm."),
            (r"^rwkv\.blocks\.", "model.layers."),
            (r"^head\.", "lm_head."),
            (r"\.ln1\.", ".input_layernorm."),
            (r"\.ln2\.", ".post_attention_layernorm."),
            (r"\.feed_forward\.key\.", ".mlp.up_proj."),
            (r"\.feed_forward\.value\.", ".mlp.down_proj."),
            (r"\.attention\.key\.", ".mixer.in_proj_k."),
            (r"\.attention\.value\.", ".mixer.in_proj_v."),
            (r"\.attention\.receptance\.", ".mixer.in_proj_r."),
            (r"\.attention\.output\.", ".mixer.out_proj."),
            (r"\.attention\.time_", ".mixer.time_"),
        ),
        defaults={
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 1024,
            "num_attention_heads": 1,  # there is no attention
            "head_dim": 2,
            "eos_token_id": 0,
            "bos_token_id": 0,
        },
    ),
}
