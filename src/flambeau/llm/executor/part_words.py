"""What parts of an Architecture are called in log lines."""

from __future__ import annotations

from collections.abc import Iterable

WORDS = {
    "activation": "its activation",
    "adapter_rank": "blocks that layers share",
    "adapts_attention": "blocks that layers share",
    "attention_gate": "gates of attention",
    "block_layers": "blocks that layers share",
    "chunks": "attention within chunks",
    "compression": "attention to compressed entries",
    "expert_norm": "norms after experts",
    "feed_forward_layers": "layers that are only a feed-forward layer",
    "gate_limits": "limits of gates",
    "has_first_norm": "a first layer without a norm",
    "has_gate": "feed-forward layers without a gate",
    "has_norm_weight": "norms without weights",
    "has_shortcuts": "experts beside two layers",
    "has_sinks": "sinks of attention over latents",
    "hashed_layers": "experts that a table chooses",
    "head_layer": "a layer before its head",
    "head_layer_bias": "a layer before its head",
    "head_size": "heads of an odd size",
    "hyper": "hyper-connections",
    "indexer": "sparse attention",
    "inner_norms": "norms within attention and feed-forward layers",
    "is_differential": "heads that are subtracted from each other",
    "joins_query_latents": "gates from latents of queries",
    "late_qk_norm": "norms of queries and keys after the rotation",
    "latent_epsilon": "norms of latents",
    "latent_scale": "scales of latents",
    "layer_input_size": "embeddings of each layer",
    "learned_rope": "learned rotations",
    "ngrams": "embeddings of several tokens",
    "norm": "its kind of norm",
    "normalizes_rotated_keys": "norms of rotated keys",
    "norm_gate_rank": "gates of norms",
    "norm_places": "the places of its norms",
    "num_blocks": "blocks that layers share",
    "num_streams": "several streams of hidden states",
    "num_zero_experts": "experts that give their inputs",
    "position_scales": "queries that grow with the position",
    "recurrence": "its recurrent layers",
    "rotated_qk_norm": "norms of queries and keys after the rotation",
    "router": "its choice of experts",
    "shapes": "layers of different sizes",
    "shared_keys": "keys and values that layers share",
    "sinks_in_windows": "sinks of some layers",
    "sparsity": "sparse activations",
    "stream_scales": "scales of the residual stream",
    "temperature_length": "queries that grow with the position",
    "tied_bias": "a bias of its tied head",
    "unrotated_layers": "layers without rotary positions",
    "value_scale": "scales of values",
    "value_size": "values of another size than keys",
    "windows": "windows of latent attention",
}


def part_words(names: Iterable[str]) -> str:
    """Fields of an Architecture in words, each once; those without words keep their names."""
    return ", ".join(dict.fromkeys(WORDS.get(name, name) for name in names))
