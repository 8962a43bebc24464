"""DeciLM (Llama-Nemotron): Llamas whose layers were made smaller one by one, or left out in part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import LLAMA_TOKENS
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.layer_sizes import LayerSizes

MULTIPLE = 256  # of intermediate sizes
NO_EFFECT = ("sparsify", "unshifted_sink", "use_prefill_window_in_sink_attention")  # of a pruning, and of sinks


def decilm(config: Config) -> Config:
    blocks = config.get("block_configs")
    return older(config) if blocks is None else from_blocks(config, blocks)


def from_blocks(config: Config, blocks: Any) -> dict[str, Any]:
    """The parts of each layer: its attention and its feed-forward layer."""
    num_layers = config["num_hidden_layers"]
    if not isinstance(blocks, list) or len(blocks) != num_layers:
        raise CheckpointError(f"block_configs must be a list of {num_layers} layers")
    heads, size = config["num_attention_heads"], config.get("head_dim")
    size = size or config["hidden_size"] // heads
    shapes, without_attention, without_mlp = [], [], []
    for number, block in enumerate(blocks):
        attention = part_of(block, "attention", {"n_heads_in_group"}, number)
        mlp = part_of(block, "ffn", {"ffn_mult", "intermediate_size"}, number)
        if attention is None and mlp is None:
            raise CheckpointError(f"block_configs: layer {number} has neither attention nor a feed-forward layer")
        shared = 1 if attention is None else int(attention["n_heads_in_group"])
        if heads % shared:
            raise CheckpointError(f"block_configs: {heads} heads cannot be divided into groups of {shared}")
        shapes.append(
            LayerSizes(
                num_heads=heads,
                num_kv_heads=heads // shared,
                head_size=size,
                intermediate_size=MULTIPLE if mlp is None else intermediate_size(config, mlp),
            )
        )
        without_attention += [number] if attention is None else []
        without_mlp += [number] if mlp is None else []
    layers = "|".join(map(str, without_attention))
    norms = ((rf"\.layers\.({layers})\.post_attention_layernorm\.", r".layers.\1.input_layernorm."),)
    return {
        "shapes": tuple(shapes),
        "intermediate_size": max(shape.intermediate_size for shape in shapes),
        "feed_forward_layers": frozenset(without_attention),
        "attention_only_layers": frozenset(without_mlp),
        "renames": norms if without_attention else (),
    }


def part_of(block: Any, name: str, known: set[str], number: int) -> Mapping[str, Any] | None:
    """The settings of attention or of the feed-forward layer; None: the layer has none."""
    part = block.get(name) if isinstance(block, Mapping) else None
    if not isinstance(part, Mapping):
        raise CheckpointError(f"block_configs: layer {number} needs {name}, an object")
    if part.get("no_op"):
        return None
    for key, value in part.items():
        if value and key not in (*known, *NO_EFFECT):
            raise CheckpointError(f"block_configs: {key} {value!r} of {name} in layer {number} is not supported")
    return part


def intermediate_size(config: Config, mlp: Mapping[str, Any]) -> int:
    if mlp.get("intermediate_size"):
        return int(mlp["intermediate_size"])
    size = int(2 * mlp["ffn_mult"] * config["hidden_size"] / 3)
    return -(-size // MULTIPLE) * MULTIPLE


def older(config: Config) -> dict[str, Any]:
    """DeciLM 7B: layers differ in their key-value heads."""
    numbers = config.get("num_key_value_heads_per_layer")
    if not isinstance(numbers, list) or len(numbers) != config["num_hidden_layers"]:
        raise CheckpointError("block_configs or num_key_value_heads_per_layer is needed here: it describes each layer")
    heads = config["num_attention_heads"]
    if any(not number or heads % number for number in numbers):
        raise CheckpointError(f"num_key_value_heads_per_layer must have divisors of {heads}")
    size = config.get("head_dim") or config["hidden_size"] // heads
    return {
        "shapes": tuple(
            LayerSizes(
                num_heads=heads,
                num_kv_heads=number,
                head_size=size,
                intermediate_size=config["intermediate_size"],
            )
            for number in numbers
        )
    }


DECILM = {
    "DeciLMForCausalLM": Family(
        model_type="nemotron-nas",
        derive=decilm,
        mlp_ratio=4,  # of blocks, each of which says it
        understands=frozenset({"num_key_value_heads", "naive_attention_prefill", "naive_attention_decode_batched"})
        | {"naive_attention_decode_single"},
        defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, **LLAMA_TOKENS},
    ),
}
