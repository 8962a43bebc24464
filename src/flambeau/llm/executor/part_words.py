"""What parts of an Architecture are called in log lines."""

from __future__ import annotations

from collections.abc import Iterable

WORDS = {
    "activation": "its activation",
    "attention_gate": "gates of attention",
    "chunks": "attention within chunks",
    "compression": "attention to compressed entries",
    "feed_forward_layers": "layers that are only a feed-forward layer",
    "gate_limit": "limits of gates",
    "hashed_layers": "experts that a table chooses",
    "has_gate": "feed-forward layers without a gate",
    "has_norm_weight": "norms without weights",
    "head_size": "heads of an odd size",
    "hyper": "hyper-connections",
    "indexer": "sparse attention",
    "inner_norms": "norms within attention and feed-forward layers",
    "late_qk_norm": "norms of queries and keys after the rotation",
    "layer_input_size": "embeddings of each layer",
    "norm": "its kind of norm",
    "norm_places": "the places of its norms",
    "num_streams": "several streams of hidden states",
    "recurrence": "its recurrent layers",
    "rotated_qk_norm": "norms of queries and keys after the rotation",
    "router": "its choice of experts",
    "shared_keys": "keys and values that layers share",
    "sparsity": "sparse activations",
    "stream_scales": "scales of the residual stream",
    "temperature_length": "queries that grow with the position",
    "unrotated_layers": "layers without rotary positions",
}


def part_words(names: Iterable[str]) -> str:
    """Fields of an Architecture in words, each once; those without words keep their names."""
    return ", ".join(dict.fromkeys(WORDS.get(name, name) for name in names))
