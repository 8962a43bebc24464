"""Qwen 4: delta nets and attention to groups of tokens, over mixed streams, with embeddings of several tokens."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import partial_rotation, text_only
from flambeau.llm.models.families.delta_nets import DELTA_NET_NAMES, QWEN_3_5_MOE, delta_nets
from flambeau.llm.models.families.family import Config
from flambeau.llm.models.families.hyper_shape import HyperShape
from flambeau.llm.models.families.indexer_shape import IndexerShape
from flambeau.llm.models.families.ngram_shape import NgramShape
from flambeau.llm.models.families.recurrence import Recurrence

INDEXED, WIDE, LINEAR = "indexed_attention", "full_attention", "linear_attention"


def qwen_4(config: Config) -> Config:
    count, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:
        every = int(config["full_attention_interval"])
        types = [LINEAR if (i + 1) % every else INDEXED for i in range(count)]
    if len(types) != count or not set(types) <= {INDEXED, WIDE, LINEAR}:
        raise CheckpointError(f"layer_types must name {count} layers, each one of {INDEXED}, {WIDE}, {LINEAR}")
    if config["hc_count"] < 2:
        raise CheckpointError(f"hc_count {config['hc_count']} is not supported; it must be at least 2")
    layers = [WIDE if kind == INDEXED else kind for kind in types]
    recurrence = replace(
        delta_nets({**config, "layer_types": layers}),
        is_grouped=False,
        has_sigmoid_gates=(config.get("output_gate_type") or config["hidden_act"]) == "sigmoid",
    )
    ngrams = read_ngrams(config, recurrence)
    if ngrams is not None:
        shapes = ngrams.states(config["hc_count"] * config["hidden_size"])
        recurrence = replace(recurrence, others=tuple((count + layer, shapes) for layer in ngrams.layers))
    rotation = partial_rotation(config)
    return {
        **rotation,
        "recurrence": recurrence,
        "ngrams": ngrams,
        "indexer": read_indexer(config, recurrence, rotation.get("rotary_size", config["head_dim"])),
        "hyper": HyperShape(num_streams=int(config["hc_count"]), epsilon=0.0, rank=int(config["hc_lowrank"])),
        "shared_expert_size": int(config["shared_expert_intermediate_size"]),
    }


def read_ngrams(config: Config, recurrence: Recurrence) -> NgramShape | None:
    """Layers with embeddings of several tokens, which files count from one; None: no layer has them."""
    layers = tuple(sorted({int(number) - 1 for number in config.get("ple_layer_ids") or ()}))
    ends = config.get("eos_token_id")
    first = ends[0] if isinstance(ends, list) and ends else ends
    size = config.get("ple_embed_dim")
    shape = NgramShape(
        layers=layers,
        size=int(config["hidden_size"] if size is None else size),
        longest=int(config["ngram_size"]),
        num_heads=int(config["heads_per_ngram"]),
        least_rows=int(config["ngram_vocab_size_base"]),
        multiple=int(config["make_ngram_vocab_size_divisible_by"]),
        seed=int(config["seed"]),
        vocab_size=int(config["vocab_size"]),
        eos_id=first if isinstance(first, int) else 0,
        conv_width=int(config["ple_conv_kernel_size"]),
        num_files=int(config["split_ngram_parts"]),
    )
    if not layers:
        return None
    if others := sorted(layer + 1 for layer in set(layers) - recurrence.layers):
        raise CheckpointError(f"ple_layer_ids has {others[0]}, which is no layer with {LINEAR}")
    if not isinstance(first, int):
        raise CheckpointError("ple_layer_ids needs eos_token_id, which begins a text")
    if shape.num_all_heads < 1 or shape.size % shape.num_all_heads:
        raise CheckpointError(f"ple_embed_dim {shape.size} cannot be divided among {shape.num_all_heads} heads")
    return shape


def read_indexer(config: Config, recurrence: Recurrence, rotary_size: int) -> IndexerShape:
    """Which groups of tokens are attended to; `indexer_budget` counts the tokens of complete ones."""
    if config.get("indexer_kv_heads") != 1:
        raise CheckpointError(f"indexer_kv_heads {config.get('indexer_kv_heads')!r} is not supported; supported is 1")
    pool, count = int(config["indexer_compress_ratio"]), int(config["indexer_budget"])
    if pool < 1 or count % pool:
        raise CheckpointError(f"indexer_compress_ratio {pool} is not supported; it must divide indexer_budget {count}")
    shape = IndexerShape(
        num_heads=int(config["indexer_n_heads"]),
        head_size=int(config["indexer_head_dim"]),
        num_chosen=count,
        pool_size=pool,
        has_mean_keys=True,
        plain_layers=recurrence.layers,
    )
    if shape.head_size < rotary_size:
        raise CheckpointError(f"indexer_head_dim {shape.head_size} is less than the rotated part of a head")
    return shape


QWEN_4 = replace(
    QWEN_3_5_MOE,
    model_type="qwen4_exp_text",
    parts={**QWEN_3_5_MOE.parts, "has_last_norm": False},
    derive=qwen_4,
    supported={
        **{key: values for key, values in QWEN_3_5_MOE.supported.items() if key != "output_gate_type"},
        "output_gate_type": (None, "sigmoid", "silu"),
    },
    renames=(
        *DELTA_NET_NAMES,
        (r"\.ple\.ple_embedding\.ngram_embedding\.", ".ngrams.table."),
        (r"\.ple\.(ple_embedding\.)?", ".ngrams."),
        (r"\.attn_hyper_connection\.", ".attn_hc."),
        (r"\.mlp_hyper_connection\.", ".ffn_hc."),
        (r"\.hyper_connection_mixer\.", ".streams.head."),
        (r"\.hc_norm\.", ".norm."),
        (r"\.input_mix_weight_down\.", ".mix_in."),
        (r"\.input_mix_weight_up\.", ".mix_out."),
        (r"\.block_inject_weight\.", ".factors."),
    ),
    defaults={
        **{key: value for key, value in QWEN_3_5_MOE.defaults.items() if key != "partial_rotary_factor"},
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "hidden_act": "silu",
        "hc_count": 4,
        "hc_lowrank": 320,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128,
        "seed": 1234,
        "split_ngram_parts": 512,
    },
)
QWEN_4_ROWS = {
    "Qwen4ExpForCausalLM": QWEN_4,
    "Qwen4ExpForConditionalGeneration": replace(
        text_only(QWEN_4), model_type="qwen4_exp", text_types=frozenset({"qwen4_exp_text"})
    ),
}
