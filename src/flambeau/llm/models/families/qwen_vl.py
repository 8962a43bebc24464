"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a token of an image has a row and a column, which rotate parts of its head."""

from __future__ import annotations

from dataclasses import replace

from flambeau.llm.errors import CheckpointError
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


def sections(config: Config, default: tuple[int, int, int], *, is_interleaved: bool) -> tuple[int, int, int]:
    """How many pairs of dimensions time, row and column rotate."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if bool(parameters.get("mrope_interleaved", is_interleaved)) != is_interleaved:
        raise CheckpointError(f"mrope_interleaved {parameters['mrope_interleaved']!r} is not supported for this family")
    given = parameters.get("mrope_section") or default
    is_valid = len(given) == 3 and all(isinstance(number, int) and number > 0 for number in given)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if not is_valid or 2 * sum(given) != size:
        raise CheckpointError(f"mrope_section must be three numbers that add up to {size // 2}, not {given!r}")
    time, rows, columns = given
    return time, rows, columns


def divided(config: Config) -> Config:
    """One section of dimensions after another."""
    found = sections(config, (16, 24, 24), is_interleaved=False)
    return {"position_axes": tuple(axis for axis, number in enumerate(found) for _ in range(number))}


def interleaved(config: Config) -> Config:
    """Time, row and column take turns until the rows and columns have all of theirs."""
    time, rows, columns = sections(config, (24, 20, 20), is_interleaved=True)
    limits = (0, 3 * rows, 3 * columns)
    return {"position_axes": tuple(i % 3 if i < limits[i % 3] else 0 for i in range(time + rows + columns))}


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
}
