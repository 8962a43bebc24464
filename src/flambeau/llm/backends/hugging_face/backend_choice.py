"""Loads a network of transformers and chooses how it is run: over blocks if it can, else with its own caches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flambeau.llm.backends.hugging_face.attention import AttentionLayer, LayerCache, NotPageable, probe
from flambeau.llm.backends.hugging_face.causal_model import CausalModel, SequenceState, cached_bytes
from flambeau.llm.backends.hugging_face.checks import (
    LENGTH,
    PAGED_TURNS,
    TURNS,
    TURNS_IN_CHUNKS,
    SequenceAbilities,
    all_agree,
    find_abilities,
    run_paged,
    run_states,
    some_ids,
    two_sequences,
    whole_logits,
)
from flambeau.llm.backends.hugging_face.paged_backend import PagedBackend
from flambeau.llm.backends.hugging_face.pretrained import read_pretrained
from flambeau.llm.backends.hugging_face.sequence_backend import SequenceBackend
from flambeau.llm.backends.hugging_face.state_backend import StateBackend
from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import CheckpointError, LLMError, NoRoom
from flambeau.llm.executor.cache_sizes import available_bytes, num_blocks_of
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.transformers_package import first_lines, quiet

logger = logging.getLogger(__name__)

CHECK_BLOCK = 4  # tokens of a block while ways are compared
CHECK_BLOCKS = 2 * LENGTH // CHECK_BLOCK + 1
# Kinds of layers that blocks can stand for, if the comparison below finds no difference; `layer_types` names them.
PAGED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention", "moe", "mlp", "dense", "sparse"})
STATE_LAYERS = frozenset({"linear_attention", "conv", "mamba", "mamba2", "hybrid", "hybrid_sliding", "recurrent"})
# Those that treat the tokens of a prompt otherwise than generated ones: computed again, a sequence would be another.
PROMPT_LAYERS = frozenset({"reference_sliding_attention"})
FAILURES = (AttributeError, AssertionError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPretrained:
    """A network of transformers with what the engine has to know of it."""

    arch: Architecture
    config: EngineConfig  # without what the network cannot do
    backend: PagedBackend | StateBackend | SequenceBackend
    num_blocks: int
    whole_prompts: bool = False


def load_pretrained(
    path: Path,
    arch: Architecture,
    config: EngineConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    reason: str,
    draft_block_bytes: int = 0,
) -> LoadedPretrained:
    """Load a folder and choose the backend; `reason` says why the engine's own network is not used."""
    network = read_pretrained(path, device=device, dtype=dtype, trusts_code=config.trust_remote_code)
    check_prompt_layers(type(network).__name__, layer_types(network.config))
    model = CausalModel(network)
    with torch.inference_mode(), quiet():
        try:
            arch = replace(arch, vocab_size=whole_logits(model, some_ids(arch.vocab_size, 2)).shape[-1])
            loaded, words = choose_backend(model, arch, config, draft_block_bytes)
        except FAILURES as error:
            raise CheckpointError(
                f"{type(network).__name__} of transformers cannot compute a text: {first_lines(error)}; if its files "
                "are right, it needs more than the tokens of a text, or another version of transformers: use a "
                "checkpoint of another network"
            ) from error
    logger.warning(
        "%s runs through transformers as %s, slower than the engine's own network would be (%s), %s",
        path,
        type(network).__name__,
        reason.partition(";")[0],
        words,
    )
    return loaded


def check_settings(config: EngineConfig) -> None:
    """Raise for settings that have no effect on networks of transformers."""
    given = {
        "quantization": config.quantization is not None,
        "kv_cache_dtype": bool(config.kv_cache_dtype),
        "kv_host_memory_mb": config.kv_host_memory_mb is not None,
        "kv_disk_folder": bool(config.kv_disk_folder),
        "lora_adapters": bool(config.lora_adapters),
        "sharing it among ranks (--tensor-parallel, parallelType: tp)": config.tensor_parallel_size > 1,
    }
    for name, is_given in given.items():
        if is_given:
            raise LLMError(
                f"{name} is only possible with the engine's own network, and this checkpoint runs through "
                "transformers; leave it out"
            )


def layer_types(config: Any) -> frozenset[str]:
    """The kinds of layers that a configuration of transformers names; none if it names none."""
    text = config.get_text_config(decoder=True)
    return frozenset(str(kind) for kind in getattr(text, "layer_types", None) or ())


def check_prompt_layers(name: str, kinds: frozenset[str]) -> None:
    """Raise for layers whose results depend on where the prompt ends."""
    if found := sorted(kinds & PROMPT_LAYERS):
        raise CheckpointError(
            f"{name} has layers of the type {found[0]}, which attend to generated tokens otherwise than to those of "
            "the prompt; the engine does not keep them apart, so it would write another text. Use transformers itself"
        )


def choose_backend(
    model: CausalModel, arch: Architecture, config: EngineConfig, draft_block_bytes: int
) -> tuple[LoadedPretrained, str]:
    """The first way that computes what the network computes by itself, and words about it for the log."""
    config = replace(config, compile=False)
    layers: list[AttentionLayer] = []
    try:
        check_positions(model, arch, config)
        layers = find_layers(model, arch)
        check_paged(model, arch, layers)
    except NotPageable as error:
        return with_states(model, arch, config, layers, str(error))
    size = sum(layer.token_size for layer in layers) * config.block_size * model.dtype.itemsize + draft_block_bytes
    num_blocks = num_blocks_of(size, arch, config, model.device, weight_bytes=weight_bytes(model))
    backend = PagedBackend(model, layers, new_cache(model, layers, num_blocks, config.block_size))
    loaded = LoadedPretrained(arch=arch, config=config, backend=backend, num_blocks=num_blocks)
    return loaded, "with paged attention"


def check_positions(model: CausalModel, arch: Architecture, config: EngineConfig) -> None:
    """Raise NotPageable if a token's position does not stand for itself."""
    if not model.takes_positions:
        raise NotPageable("it takes no positions")
    if other := sorted(layer_types(model.network.config) - PAGED_LAYERS - STATE_LAYERS):
        raise NotPageable(f"its layers are of the type {other[0]}")
    if depends_on_length(model.network.config.get_text_config(decoder=True), config.max_model_len or arch.max_length):
        raise NotPageable("its rotary positions depend on the length of the sequence (longrope)")


def find_layers(model: CausalModel, arch: Architecture) -> list[AttentionLayer]:
    """The layers whose attention goes through transformers' interface; raises NotPageable."""
    ids_1T = some_ids(arch.vocab_size, LENGTH)[None].to(model.device)
    inputs = {"input_ids": ids_1T, "position_ids": torch.arange(LENGTH, device=model.device)[None]}
    return probe(lambda: model.network(**inputs, use_cache=False), model.network)


def check_paged(model: CausalModel, arch: Architecture, layers: list[AttentionLayer]) -> None:
    """Raise NotPageable if the network gives other logits over blocks."""
    sequences = [some_ids(arch.vocab_size, LENGTH, seed) for seed in range(2)]
    expected = [whole_logits(model, ids_T) for ids_T in sequences]
    with restored_on_error(model):
        backend = PagedBackend(model, layers, new_cache(model, layers, CHECK_BLOCKS, CHECK_BLOCK))
        found = run_paged(backend, sequences, CHECK_BLOCK)
        if not all_agree(found, expected, model.dtype, PAGED_TURNS):
            raise NotPageable("it keeps more than keys and values")
        if backend.counts_cached_tokens(two_sequences(sequences, (0, 0), (3, 0), CHECK_BLOCK)):
            raise NotPageable("its attention depends on the number of tokens in its cache")


def new_cache(model: CausalModel, layers: list[AttentionLayer], num_blocks: int, block_size: int) -> LayerCache:
    return LayerCache(layers, num_blocks, block_size, device=model.device, dtype=model.dtype)


@contextmanager
def restored_on_error(model: CausalModel) -> Iterator[None]:
    """Give the network its own attention back if a way fails, and say so as NotPageable."""
    before = model.network.config._attn_implementation
    try:
        yield
    except NotPageable:
        model.network.set_attn_implementation(before)
        raise
    except FAILURES as error:
        model.network.set_attn_implementation(before)
        raise NotPageable(f"it fails with paged attention ({first_lines(error)})") from error


def depends_on_length(text: Any, length: int) -> bool:
    """Whether positions are scaled by factors that change when a sequence gets long."""
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = [given, *(value for value in given.values() if isinstance(value, Mapping))]
    for one in kinds:
        if one.get("rope_type") == "longrope":
            original = one.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", 0
            )
            return bool(length > (original or 0))
    return False


def with_states(
    model: CausalModel, arch: Architecture, config: EngineConfig, layers: list[AttentionLayer], reason: str
) -> tuple[LoadedPretrained, str]:
    """States beside paged attention, or else caches of transformers for everything that is kept."""
    abilities = find_abilities(model, arch.vocab_size)
    if abilities is None:
        raise CheckpointError(
            f"the tokens of {type(model.network).__name__} depend on those that follow them: it does not continue a "
            "text; use a checkpoint of a network that does"
        )
    whole = not abilities.takes_chunks or depends_on_length(model.network.config.get_text_config(decoder=True), 1 << 30)
    is_off = [" and speculation is off"] if config.speculation is not None or config.draft else []
    number = config.max_num_seqs if abilities.takes_turns else 1
    config = replace(config, prefix_cache=False, speculation=None, draft="", max_num_seqs=number)
    token_bytes, state_bytes = measure_cache(model, arch)
    has_states = can_stack(model, arch, layers, abilities)
    if has_states:
        token_bytes = sum(layer.token_size for layer in layers) * model.dtype.itemsize
    config, num_blocks = bounded(model, arch, config, token_bytes, state_bytes)
    backend: StateBackend | SequenceBackend = SequenceBackend(model)
    words = [f"with a cache for each sequence because {reason}"]
    if has_states:
        backend = StateBackend(model, layers, new_cache(model, layers, num_blocks, config.block_size))
        words = [f"with {'paged attention and ' if layers else ''}a state for each sequence"]
    words.append("prefixes are not reused" + "".join(is_off))
    if whole:
        words.append("prompts are computed in one step")
    if not abilities.takes_turns:
        words.append("one sequence runs at a time, as the network keeps its state in itself")
    if not abilities.is_steady:
        words.append("single tokens get other logits than the same tokens in a prompt, as in transformers")
    loaded = LoadedPretrained(arch=arch, config=config, backend=backend, num_blocks=num_blocks, whole_prompts=whole)
    return loaded, "; ".join(words)


def can_stack(
    model: CausalModel, arch: Architecture, layers: list[AttentionLayer], abilities: SequenceAbilities
) -> bool:
    """Whether sequences whose states are stacked get the logits that they get alone."""
    if not abilities.takes_turns or not abilities.is_steady:
        return False
    sequences = [some_ids(arch.vocab_size, LENGTH, seed) for seed in range(2)]
    expected = [whole_logits(model, ids_T) for ids_T in sequences]
    turns = TURNS_IN_CHUNKS if abilities.takes_chunks else TURNS
    try:
        with restored_on_error(model):
            backend = StateBackend(model, layers, new_cache(model, layers, CHECK_BLOCKS, CHECK_BLOCK))
            found = run_states(backend, sequences, CHECK_BLOCK, turns)
            if not all_agree(found, expected, model.dtype, turns):
                raise NotPageable("its states cannot be stacked")
    except NotPageable:
        return False
    return True


def bounded(
    model: CausalModel, arch: Architecture, config: EngineConfig, token_bytes: int, state_bytes: int
) -> tuple[EngineConfig, int]:
    """As many sequences and blocks as the memory allows; the blocks of caches for each sequence only count tokens."""
    available = available_bytes(arch, config, model.device)
    if state_bytes:
        most = available // 2 // (2 * state_bytes)  # twice: while states are stacked
        if most < 1:
            raise NoRoom(f"no memory is left on {model.device} for the state of a sequence, {state_bytes} bytes")
        config = replace(config, max_num_seqs=min(config.max_num_seqs, most))
    left = available - 2 * state_bytes * config.max_num_seqs
    counted = config if config.num_blocks is not None else replace(config, kv_cache_bytes=left)
    size = max(1, token_bytes * config.block_size)
    return config, num_blocks_of(size, arch, counted, model.device, weight_bytes=weight_bytes(model))


def measure_cache(model: CausalModel, arch: Architecture) -> tuple[int, int]:
    """Bytes that are kept for each token, and for a sequence however long it is."""
    state, ids_T = SequenceState(model), some_ids(arch.vocab_size, LENGTH)
    sizes = []
    for place in (0, 1, 2):
        state.run(ids_T[: LENGTH - 2] if place == 0 else ids_T[LENGTH - 3 + place : LENGTH - 2 + place])
        sizes.append(cached_bytes(state.cache))
    token_bytes = max(0, sizes[2] - sizes[1])
    return token_bytes, max(0, sizes[2] - token_bytes * LENGTH)


def weight_bytes(model: CausalModel) -> int:
    network = model.module
    return sum(tensor.numel() * tensor.itemsize for tensor in (*network.parameters(), *network.buffers()))
