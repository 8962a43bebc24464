"""Language models of checkpoints that also hold encoders of images or sounds, which are left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.config_parts import VISION, dense_layers, text_only
from flambeau.llm.models.families.family import Config, Family
from flambeau.llm.models.families.layer_norm import LAYER_NORM, cohere
from flambeau.llm.models.families.llama_like import LLAMA_LIKE, PHI_3
from flambeau.llm.models.families.softmax_experts import SOFTMAX_EXPERTS

HUNYUAN = LLAMA_LIKE["HunYuanDenseV1ForCausalLM"]
ERNIE = SOFTMAX_EXPERTS["Ernie4_5_MoeForCausalLM"]
COMMAND = LAYER_NORM["Cohere2ForCausalLM"]
SECTIONS = frozenset({"mrope_section", "mrope_interleaved"})  # positions of a text are equal on all axes


def hunyuan_positions(config: Config) -> Config:
    """Positions of images have four axes, which older files call a kind of scaling."""
    found = dict(config)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(found.get(key), dict):
            given = {name: value for name, value in found[key].items() if name != "xdrope_section"}
            found[key] = {name: "dynamic" if value == "xdrope" else value for name, value in given.items()}
    return found


def ernie_numbers(config: Config) -> Config:
    """Lists have the numbers of texts and those of images; the experts of both are equally many."""
    found = dict(config)
    numbers = found.get("moe_num_experts")
    if isinstance(numbers, list) and len(set(numbers)) != 1:
        raise CheckpointError(f"moe_num_experts {numbers} is not supported; both must be the same")
    for key in ("moe_num_experts", "moe_intermediate_size", "moe_layer_start_index", "moe_layer_end_index"):
        if isinstance(found.get(key), list):
            found[key] = found[key][0]
    return found


def ernie_vision(config: Config) -> Config:
    """Experts of images are numbered after those of texts."""
    number = int(config["num_experts"])
    others = "|".join(map(str, range(number, 2 * number)))
    derive = ERNIE.derive
    assert derive is not None
    parts = dict(derive(config))
    if config.get("mlp_layer_types") is not None:
        parts["dense_layers"] = dense_layers(config, 1)
    leaves = rf"\.mlp\.gate\.weight_1$|\.mlp\.experts\.({others})\."
    return {**parts, "unused": rf"{VISION}|^(model\.)?resampler_model\.|{leaves}"}


def compass_positions(config: Config) -> Config:
    """Types of layers have rope parameters of their own, or none: those layers are not rotated."""
    found, parameters = dict(config), config.get("rope_parameters") or {}
    if found.get("layer_types") is None:
        found["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    kinds = dict.fromkeys(found["layer_types"])
    if not set(kinds) <= set(parameters):
        raise CheckpointError(f"rope_parameters must have {' and '.join(kinds)}; null stands for no positions")
    given = [parameters[kind] for kind in kinds]
    rotated = [each for each in given if each is not None]
    if any(each != rotated[0] for each in rotated):
        raise CheckpointError("rope_parameters that differ between types of layers are not supported")
    found["rope_parameters"] = rotated[0] if rotated else {}
    found["unrotated_types"] = [kind for kind in found["layer_types"] if parameters[kind] is None]
    return found


def compass(config: Config) -> Config:
    kinds, unrotated = config["layer_types"], set(config["unrotated_types"])
    layers = frozenset(i for i, kind in enumerate(kinds) if kind in unrotated)
    scale = config.get("logit_scale")
    return {**cohere({**config, "logit_scale": 1.0 if scale is None else scale}), "unrotated_layers": layers}


COMPASS_DEFAULTS: dict[str, Any] = {**COMMAND.defaults, "logit_scale": None}
COMPASS = replace(
    COMMAND,
    model_type="cohere_compass_text",
    windowed="named",
    rotates_windows=False,
    arrange=compass_positions,
    parts={"norm": "layer", "is_parallel": True},
    derive=compass,
    understands=SECTIONS | {"pooling"},
    supported={},
    defaults=COMPASS_DEFAULTS,
)

ERNIE_VISION = replace(
    text_only(ERNIE),
    model_type="ernie4_5_vl_moe",
    text_types=frozenset({"ernie4_5_vl_moe_text"}),
    arrange=ernie_numbers,
    parts={**ERNIE.parts, "transposed": r"\.mlp\.gate\.weight$"},
    derive=ernie_vision,
    understands=ERNIE.understands | SECTIONS,
)

TEXT_DECODERS: dict[str, Family] = {
    "HunYuanVLForConditionalGeneration": replace(
        text_only(HUNYUAN),
        model_type="hunyuan_vl",
        text_types=frozenset({"hunyuan_vl_text"}),
        arrange=hunyuan_positions,
        parts={**HUNYUAN.parts, "unused": rf"{VISION}|^(model\.)?vit\."},
        understands=HUNYUAN.understands | SECTIONS | {"sep_token_id", "vision_config", "image_token_id"},
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": ERNIE_VISION,
    "Ernie4_5_VL_MoeForConditionalGeneration": ERNIE_VISION,  # an older name
    "CohereCompassForCausalLM": COMPASS,
    "CohereCompassForConditionalGeneration": replace(
        text_only(COMPASS),
        model_type="cohere_compass",
        text_types=frozenset({"cohere_compass_text"}),
    ),
    "Phi4MultimodalForCausalLM": replace(
        PHI_3,
        model_type="phi4_multimodal",
        parts={"unused": r"^model\.embed_tokens_extend\."},
        understands=PHI_3.understands | {"vision_config", "audio_config"},
        defaults={**PHI_3.defaults, "max_position_embeddings": 131072, "eos_token_id": [199999, 200020]},
    ),
    "AriaForConditionalGeneration": replace(
        text_only(SOFTMAX_EXPERTS["AriaTextForCausalLM"]),
        model_type="aria",
        text_types=frozenset({"aria_text"}),
    ),
}
