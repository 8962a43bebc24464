"""SOUND_READERS: models whose sounds transformers encodes, and whose texts the engine's own network continues.

Each row was compared with the whole model of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundReader:
    """How an encoder of transformers is used."""

    model_type: str
    class_name: str  # the class in transformers that has the encoder
    processor: str  # the class of its processor
    sound_id: int  # the token in the places of a sound, if config.json names none
    text_type: str  # the model_type of its decoder, if config.json names none
    inputs: tuple[str, ...] = ("input_features", "input_features_mask")  # what its encoder takes
    # Longer sounds, which transformers would cut off, are refused: those longer than the window of its extractor …
    has_window: bool = False
    longest_samples: int | None = None  # … or than so many samples …
    longest_key: str = ""  # … or than whole windows fit into the seconds that an attribute of its processor says.
    reads_one: bool = False  # its processor takes one sound in a chat
    is_optional: bool = False  # models of this class may have no encoder: config.json has no audio_config
    more_ids: str = ""  # the key of a further token in the text of a sound that the encoder embeds, and what it is …
    more_default: int = 0  # … if config.json does not say it
    since: tuple[int, int] = (5, 22)  # the version of transformers whose processor was compared first
    needs_timm: bool = False  # its class cannot be built without that package
    text_sizes: Mapping[str, Any] = field(default_factory=dict)  # of text_config, where this class has its own defaults


SOUND_READERS = {
    "Qwen2AudioForConditionalGeneration": SoundReader(
        model_type="qwen2_audio",
        class_name="Qwen2AudioModel",
        processor="Qwen2AudioProcessor",
        sound_id=151646,
        text_type="qwen2",
        inputs=("input_features", "feature_attention_mask"),
        has_window=True,
    ),
    "AudioFlamingo3ForConditionalGeneration": SoundReader(
        model_type="audioflamingo3",
        class_name="AudioFlamingo3Model",
        processor="AudioFlamingo3Processor",
        sound_id=151669,
        text_type="qwen2",
        longest_key="max_audio_len",
        reads_one=True,
    ),
    "GlmAsrForConditionalGeneration": SoundReader(
        model_type="glmasr",
        class_name="GlmAsrModel",
        processor="GlmAsrProcessor",
        sound_id=59260,
        text_type="llama",
        longest_key="max_audio_len",
        reads_one=True,
        text_sizes={
            "vocab_size": 59264,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "eos_token_id": [59246, 59253, 59255],
        },
    ),
    "Qwen3ASRForConditionalGeneration": SoundReader(
        model_type="qwen3_asr",
        class_name="Qwen3ASRModel",
        processor="Qwen3ASRProcessor",
        sound_id=151676,
        text_type="qwen3",
        reads_one=True,
        text_sizes={
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 65536,
            "eos_token_id": [151643, 151645],
        },
    ),
    "VoxtralForConditionalGeneration": SoundReader(
        model_type="voxtral",
        class_name="VoxtralModel",
        processor="VoxtralProcessor",
        sound_id=24,
        text_type="llama",
        inputs=("input_features",),
        text_sizes={
            "vocab_size": 131072,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e8,
            "head_dim": 128,
        },
    ),
    "Gemma3nForConditionalGeneration": SoundReader(
        model_type="gemma3n",
        class_name="Gemma3nModel",
        processor="Gemma3nProcessor",
        sound_id=262273,
        text_type="gemma3n_text",
        longest_samples=480_000,
        more_ids="eoa_token_id",
        more_default=262272,
        needs_timm=True,
    ),
    "Gemma4ForConditionalGeneration": SoundReader(
        model_type="gemma4",
        class_name="Gemma4Model",
        processor="Gemma4Processor",
        sound_id=258881,
        text_type="gemma4_text",
        longest_samples=480_000,
        is_optional=True,
    ),
    "Gemma4UnifiedForConditionalGeneration": SoundReader(
        model_type="gemma4_unified",
        class_name="Gemma4UnifiedModel",
        processor="Gemma4UnifiedProcessor",
        sound_id=258881,
        text_type="gemma4_unified_text",
        is_optional=True,
    ),
    "Qwen2_5OmniThinkerForConditionalGeneration": SoundReader(
        model_type="qwen2_5_omni_thinker",
        class_name="Qwen2_5OmniThinkerForConditionalGeneration",
        processor="Qwen2_5OmniProcessor",
        sound_id=151646,
        text_type="qwen2_5_omni_text",
        inputs=("input_features", "feature_attention_mask"),
        has_window=True,
        since=(5, 23),
    ),
    "Qwen3OmniMoeThinkerForConditionalGeneration": SoundReader(
        model_type="qwen3_omni_moe_thinker",
        class_name="Qwen3OmniMoeThinkerForConditionalGeneration",
        processor="Qwen3OmniMoeProcessor",
        sound_id=151646,
        text_type="qwen3_omni_moe_text",
        inputs=("input_features", "feature_attention_mask"),
        since=(5, 23),
    ),
}
REFUSED = {  # why models that read sounds are not read
    "FunAsrNanoForConditionalGeneration": "its features need torchaudio, and were not compared",
    "GraniteSpeechForConditionalGeneration": "sounds switch on an adapter of its own, which texts do not have",
    "MusicFlamingoForConditionalGeneration": "the times of a sound rotate its embeddings",
}
