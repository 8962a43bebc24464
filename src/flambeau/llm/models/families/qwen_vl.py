"""Qwen2-VL to Qwen 3.5 with images: a token of an image has a row and a column, which rotate parts of its head."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families import delta_nets
from flambeau.llm.models.families.family import Config, Family

SECTION_KEYS = frozenset({"mrope_section", "mrope_interleaved"})
NAMES = (
    (r"^model\.language_model\.", "model."),
    (r"^language_model\.(model|lm_head)\.", r"\1."),
)
QWEN_2_DEFAULTS = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "max_window_layers": 80,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
QWEN_3_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rope_theta": 500000.0,
}


def sections(
    config: Config, default: tuple[int, int, int], num_pairs: int, *, is_interleaved: bool
) -> tuple[int, int, int]:
    """How many pairs of dimensions time, row and column rotate."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if bool(parameters.get("mrope_interleaved", is_interleaved)) != is_interleaved:
        raise CheckpointError(f"mrope_interleaved {parameters['mrope_interleaved']!r} is not supported for this family")
    given = parameters.get("mrope_section")
    if given is None:
        return default
    if (
        len(given) != 3
        or not all(isinstance(number, int) and number > 0 for number in given)
        or sum(given) != num_pairs
    ):
        raise CheckpointError(f"mrope_section must be three numbers that add up to {num_pairs}, not {given!r}")
    time, rows, columns = given
    return time, rows, columns


def pairs_of(config: Config) -> int:
    """The pairs of dimensions of a head."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(size) // 2


def divided(config: Config) -> Config:
    num_pairs = pairs_of(config)
    found = sections(config, (16, 24, 24), num_pairs, is_interleaved=False)
    return {"position_axes": one_after_another(found, num_pairs)}


def one_after_another(numbers: tuple[int, int, int], num_pairs: int) -> tuple[int, ...]:
    """The axes of pairs of dimensions, in one section after another."""
    if sum(numbers) != num_pairs:
        raise CheckpointError(f"mrope_section is missing: three numbers that add up to {num_pairs}")
    return tuple(axis for axis, number in enumerate(numbers) for _ in range(number))


def interleaved(config: Config) -> Config:
    """Time, row and column take turns until the rows and columns have all of theirs."""
    num_pairs = pairs_of(config)
    return {"position_axes": in_turns(sections(config, (24, 20, 20), num_pairs, is_interleaved=True), num_pairs)}


def qwen_3_5(config: Config) -> Config:
    """The same in the part of a head that is rotated."""
    parts = delta_nets.qwen_3_5_moe(config) if config.get("num_experts") else delta_nets.qwen_3_5(config)
    num_pairs = (parts.get("rotary_size") or 2 * pairs_of(config)) // 2
    found = sections(config, (11, 11, 10), num_pairs, is_interleaved=True)
    return {**parts, "position_axes": in_turns(found, num_pairs)}


def in_turns(numbers: tuple[int, int, int], num_pairs: int) -> tuple[int, ...]:
    limits = (0, 3 * numbers[1], 3 * numbers[2])
    return tuple(i % 3 if i < limits[i % 3] else 0 for i in range(num_pairs))


QWEN_2 = Family(
    model_type="qwen2_vl",
    vision="qwen_2",
    qkv_bias=True,
    output_bias=False,
    windowed="late",
    derive=divided,
    understands=SECTION_KEYS,
    renames=NAMES,
    defaults=QWEN_2_DEFAULTS,
)
QWEN_3 = Family(
    model_type="qwen3_vl",
    vision="qwen_3",
    qk_norm=True,
    derive=interleaved,
    understands=SECTION_KEYS,
    renames=NAMES,
    defaults=QWEN_3_DEFAULTS,
)


def reading_images(text: Family, model_type: str) -> Family:
    """Qwen 3.5 with its encoder of images."""
    return replace(
        text,
        model_type=model_type,
        vision="qwen_3.5",
        derive=qwen_3_5,
        understands=text.understands | SECTION_KEYS,
        renames=(*NAMES, *text.renames),
    )


QWEN_VL = {
    "Qwen2VLForConditionalGeneration": QWEN_2,
    "Qwen2_5_VLForConditionalGeneration": replace(QWEN_2, model_type="qwen2_5_vl", vision="qwen_2.5"),
    "Qwen3VLForConditionalGeneration": QWEN_3,
    "Qwen3VLMoeForConditionalGeneration": replace(
        QWEN_3,
        model_type="qwen3_vl_moe",
        experts=True,
        parts={"either_order": True},  # transposed in the released files, and not in those of transformers 5
        supported={"norm_topk_prob": (None, True)},
        defaults={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 128000,
            "rope_theta": 500000.0,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_experts": 60,
        },
    ),
    "Qwen3_5ForConditionalGeneration": reading_images(delta_nets.QWEN_3_5, "qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration": reading_images(delta_nets.QWEN_3_5_MOE, "qwen3_5_moe"),
}
