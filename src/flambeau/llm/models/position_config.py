"""What config.json says of positions: how they are rotated and scaled, and which tokens a layer attends to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from flambeau.llm.errors import CheckpointError, InvalidConfig
from flambeau.llm.models.architecture import RopeKind, RopeScaling
from flambeau.llm.models.config_keys import DUAL_CHUNKS
from flambeau.llm.models.config_values import integer, number, section
from flambeau.llm.models.families.config_parts import partial_rotation
from flambeau.llm.models.families.family import Config, Family

MSCALES = frozenset({"short_mscale", "long_mscale"})  # of longrope
LAYER_TYPES = ("full_attention", "sliding_attention")
DEFAULT_THETA = 10000.0
RENAMED_KINDS = {"su": "longrope"}  # of rotary positions


def rope_theta(config: Config, family: Family) -> float:
    """The base of the frequencies, which may be outside of the rope parameters."""
    return number(rope_parameters(config, family), "rope_theta", number(config, "rope_theta", DEFAULT_THETA))


def max_length(config: Config, scaling: RopeScaling | None) -> int:
    """The longest sequence; Qwen's config.json has the length before YaRN scaling.

    Dual chunk attention (Qwen's models for a million tokens) is like any other up to the end of the first chunk.
    """
    named = integer(config, "max_position_embeddings")
    if chunks := section(config, DUAL_CHUNKS):
        return min(named, integer(chunks, "chunk_size") - integer(chunks, "local_size", 0, least=0))
    return max(named, int(scaling.factor * scaling.original_length)) if scaling and scaling.kind == "yarn" else named


def rope_parameters(config: Config, family: Family) -> Config:
    """The settings of rotary positions: `rope_parameters` since transformers 5, `rope_scaling` before."""
    given, scaling = section(config, "rope_parameters"), section(config, "rope_scaling")
    wide, narrow = family.rope_sections
    if family.has_local_rope and isinstance(given.get(wide), Mapping):
        local = section(given, narrow)
        if local.get("rope_type", "default") != "default":
            raise CheckpointError(f"rope type {local['rope_type']!r} of layers with a window is not supported")
        given = given[wide]
        if given.get("rope_type") == "yarn" and not given.get("truncate", True):
            raise CheckpointError(f"rope_parameters.{wide}.truncate is not supported: transformers ignores it")
    parameters = scaling or given  # people add rope_scaling to files that have the other: it replaces all of it
    if scaling and "rope_theta" in given and "rope_theta" not in scaling:
        theta, other = given["rope_theta"], config.get("rope_theta", DEFAULT_THETA)
        if theta is not None and theta != other:
            raise InvalidConfig(
                f"rope_scaling replaces rope_parameters, which alone has rope_theta {theta:g}; without it, it is "
                f"{other:g}. Copy rope_theta into rope_scaling"
            )
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise CheckpointError("rope_parameters that differ between types of layers are not supported")
    return {key: value for key, value in parameters.items() if value is not None}


def rope_scaling(config: Config, family: Family) -> RopeScaling | None:
    """How positions are scaled; None: not at all."""
    parameters = rope_parameters(config, family)
    kind: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = RENAMED_KINDS.get(kind, kind)
    is_partial = kind != "proportional" and parameters.get("partial_rotary_factor", 1) != 1
    if is_partial and "partial_rotary_factor" not in family.understands:
        raise CheckpointError("partial_rotary_factor is not supported here: the whole head must be rotated")
    if kind == "proportional" and "partial_rotary_factor" in family.understands:
        raise CheckpointError(
            f"rope type {kind!r} is not supported for {family.model_type}, which rotates a part already"
        )
    if kind == "mrope" and "mrope_section" in family.understands:  # how positions are divided, not how they are scaled
        return None
    if kind in ("default", "dynamic"):  # dynamic has no effect up to max_position_embeddings, where sequences end
        return None
    if kind not in get_args(RopeKind):
        names = ", ".join(("default", "dynamic", *get_args(RopeKind)))
        raise CheckpointError(f"rope type {kind!r} is not supported; supported are {names}")
    trained = integer(config, "max_position_embeddings")
    outside = config.get("original_max_position_embeddings")
    default = trained if kind != "longrope" or outside is None else outside  # Phi-3 has it outside
    original = integer(parameters, "original_max_position_embeddings", default)
    if kind != "linear" and outside is not None and outside != original:
        raise InvalidConfig(
            f"original_max_position_embeddings is {outside} outside of the rope parameters and {original} for them; "
            "put the right one into both places"
        )
    has_mscales = kind == "longrope" and family.understands >= MSCALES
    mscales = {key: number(parameters, key) for key in MSCALES} if has_mscales else {}
    return RopeScaling(
        kind=kind,
        factor=number(parameters, "factor", default_factor(kind, trained, original)),
        original_length=original,
        low_frequency_factor=number(parameters, "low_freq_factor", 1.0),
        high_frequency_factor=number(parameters, "high_freq_factor", 4.0),
        beta_fast=number(parameters, "beta_fast", 32.0),
        beta_slow=number(parameters, "beta_slow", 1.0),
        attention_factor=parameters.get("attention_factor", family.attention_factor),
        mscale=parameters.get("mscale"),
        mscale_all_dimensions=parameters.get("mscale_all_dim"),
        truncate=parameters.get("truncate", True),
        proportion=number(parameters, "partial_rotary_factor", 1.0) if kind == "proportional" else 1.0,
        short_factors=long_factors(config, parameters, "short_factor") if kind == "longrope" else (),
        long_factors=long_factors(config, parameters, "long_factor") if kind == "longrope" else (),
        **mscales,
    )


def default_factor(kind: RopeKind, trained: int, original: int) -> float | None:
    """The factor of positions where config.json has none; None: it has to."""
    if kind == "proportional":
        return 1.0
    return trained / original if kind in ("yarn", "longrope") else None


def long_factors(config: Config, parameters: Config, key: str) -> tuple[float, ...]:
    """The factors of all pairs of dimensions that are rotated."""
    factors = parameters.get(key)
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    size = partial_rotation(config).get("rotary_size", head_size)
    if not isinstance(factors, list) or len(factors) != size // 2:
        raise InvalidConfig(f"rope type 'longrope' needs {key}, a list of {size // 2} numbers")
    return tuple(float(factor) for factor in factors)


def windows(config: Config, family: Family, length: int) -> tuple[int | None, ...]:
    """The attention window of each layer; empty if no layer has one."""
    is_off = family.switches_window and not config.get("use_sliding_window")
    names_windows = family.windowed != "none" and "sliding_attention" in (config.get("layer_types") or ())
    if is_off and names_windows and config.get("sliding_window") is not None:
        raise CheckpointError(
            "layer_types names layers with a window (sliding_attention), and use_sliding_window switches it off; "
            "remove one of the two keys"
        )
    if family.windowed == "none" or is_off or (config.get("sliding_window") is None and not family.has_local_rope):
        return ()
    window = integer(config, "sliding_window")
    # A window beyond the longest sequence has no effect, but its layers may have rotary positions of their own.
    layers = windowed_layers(config, family) if window < length or family.has_local_rope else frozenset()
    return tuple(window if i in layers else None for i in range(integer(config, "num_hidden_layers"))) if layers else ()


def windowed_layers(config: Config, family: Family) -> frozenset[int]:
    """The layers with a window, in a model that has one."""
    num_layers, named = integer(config, "num_hidden_layers"), config.get("layer_types")
    if named is not None:
        if len(named) != num_layers or not set(named) <= set(LAYER_TYPES):
            raise CheckpointError(f"layer_types must name {num_layers} layers, each one of {', '.join(LAYER_TYPES)}")
        if not family.names_layers and set(named) != {"sliding_attention"}:
            raise CheckpointError(
                f"layer_types are not supported for {family.model_type}: all its layers have the window"
            )
        return frozenset(i for i, kind in enumerate(named) if kind == "sliding_attention")
    if family.windowed == "named":
        return frozenset()
    if family.windowed == "all":
        return frozenset(range(num_layers))
    if family.windowed == "unrotated":
        return unrotated_layers(config, family)
    if family.windowed == "even":
        return frozenset(range(0, num_layers, 2))
    if family.windowed == "pattern":
        every = integer(config, "sliding_window_pattern")
        return frozenset(i for i in range(num_layers) if (i + 1) % every)
    return frozenset(range(integer(config, "max_window_layers", least=0), num_layers))


def unrotated_layers(config: Config, family: Family) -> frozenset[int]:
    """The layers without rotary positions (SmolLM 3), or without a window in models that rotate only those."""
    if not family.is_rotated:
        return frozenset(range(integer(config, "num_hidden_layers")))
    if family.rotates_windows:
        num_layers = integer(config, "num_hidden_layers")
        has_windows = config.get("sliding_window") is not None
        return frozenset(range(num_layers)) - windowed_layers(config, family) if has_windows else frozenset()
    if family.model_type != "smollm3":
        return frozenset()
    rotated = config.get("no_rope_layers")  # despite its name, 1 for layers with rotary positions
    if rotated is not None:
        return frozenset(i for i, is_rotated in enumerate(rotated) if not is_rotated)
    interval = integer(config, "no_rope_layer_interval")
    return frozenset(i for i in range(integer(config, "num_hidden_layers")) if (i + 1) % interval == 0)
