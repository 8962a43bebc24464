"""Which layers of a network are recurrent, by the types that config.json lists."""

from __future__ import annotations

from flambeau.llm.errors import CheckpointError

ATTENTION_TYPES = ("full_attention", "attention")
RECURRENT_TYPES = ("linear_attention", "mamba", "conv")
SILU = ("swish", "silu")  # the activation of convolutions


def named_layers(types: object, num_layers: int) -> frozenset[int]:
    """The recurrent layers in a list of the types of all layers."""
    known = ATTENTION_TYPES + RECURRENT_TYPES
    if not isinstance(types, list | tuple) or len(types) != num_layers or not set(types) <= set(known):
        raise CheckpointError(f"layer_types must name {num_layers} layers, each one of {', '.join(known)}")
    return frozenset(i for i, kind in enumerate(types) if kind in RECURRENT_TYPES)
