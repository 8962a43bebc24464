"""Tiny random models whose sounds transformers encodes, with their tokenizers, chat templates and processors."""

from __future__ import annotations

import base64
import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flambeau.llm.text.tekken import FIRST_TOKENS
from support.more_vision_models import GEMMA_4, GEMMA_4_TOWER, GEMMA_IDS, GEMMA_TOKENS, MORE_KINDS
from support.omni_models import OMNI_KINDS
from support.pretrained_vision_models import ID, LLAMA, QWEN_2, QWEN_3, Kind, write_pretrained_vision_model

RATE = 16_000
WHISPER: dict[str, Any] = {
    "num_mel_bins": 8,
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
}
EXTRACTOR = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "sampling_rate": RATE}
SOUND = ID["<|audio|>"]
AUDIO_TOKENS = {"audio_token": "<|audio|>", "audio_bos_token": "<start_of_audio>", "audio_eos_token": "<end_of_audio>"}
GEMMA_4_AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [128, 4],
    "output_proj_dims": 24,
}

WRITTEN = ((r"^language_model\.model\.model\.", "language_model.model."),)  # names that no released file has
SOUND_KINDS = {
    "qwen-2-audio": Kind(
        name="Qwen2Audio",
        config={
            "text_config": QWEN_2,
            "audio_config": {**WHISPER, "model_type": "qwen2_audio_encoder", "max_source_positions": 100},
            "audio_token_index": SOUND,
        },
        processor={"processor_class": "Qwen2AudioProcessor"},
        images={**EXTRACTOR, "chunk_length": 2},
        tokens=AUDIO_TOKENS,
        renames=WRITTEN,
    ),
    "audio-flamingo-3": Kind(
        name="AudioFlamingo3",
        config={
            "text_config": QWEN_2,
            "audio_config": {
                "model_type": "audioflamingo3_encoder",
                "num_mel_bins": 8,
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "max_source_positions": 50,
            },
            "audio_token_id": SOUND,
        },
        processor={"processor_class": "AudioFlamingo3Processor", "audio_token": "<|audio|>", "max_audio_len": 4},
        images={**EXTRACTOR, "chunk_length": 1},
        renames=WRITTEN,
    ),
    "glm-asr": Kind(
        name="GlmAsr",
        config={
            "text_config": {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            "audio_config": {
                "model_type": "glmasr_encoder",
                "num_mel_bins": 8,
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "max_position_embeddings": 64,
            },
            "audio_token_id": SOUND,
            "tie_word_embeddings": False,
        },
        processor={"processor_class": "GlmAsrProcessor", "audio_token": "<|audio|>", "max_audio_len": 4.5},
        images={**EXTRACTOR, "chunk_length": 1, "hop_length": 125},
        renames=WRITTEN,
    ),
    "qwen-3-asr": Kind(
        name="Qwen3ASR",
        config={
            "text_config": QWEN_3,
            "audio_config": {
                **WHISPER,
                "model_type": "qwen3_asr_encoder",
                "num_mel_bins": 16,
                "output_dim": 32,
                "n_window": 50,
                "n_window_infer": 200,
                "downsample_hidden_size": 4,
            },
            "audio_token_id": SOUND,
            "eos_token_id": [ID["<eos>"]],
            "tie_word_embeddings": False,
        },
        processor={"processor_class": "Qwen3ASRProcessor"},
        images={"feature_extractor_type": "Qwen3ASRFeatureExtractor", "feature_size": 16},
        tokens=AUDIO_TOKENS,
    ),
    **OMNI_KINDS,
    "gemma-3n": MORE_KINDS["gemma-3n"],
    "gemma-4": Kind(
        name="Gemma4",
        config={
            "text_config": GEMMA_4,
            "vision_config": GEMMA_4_TOWER,
            "audio_config": {**GEMMA_4_AUDIO, "model_type": "gemma4_audio"},
            **GEMMA_IDS,
        },
        processor={
            **MORE_KINDS["gemma-4"].processor,
            "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        },
        images=MORE_KINDS["gemma-4"].images,
        tokens=GEMMA_TOKENS,
    ),
    "gemma-4-unified": Kind(
        name="Gemma4Unified",
        config={
            **MORE_KINDS["gemma-4-unified"].config,
            "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 640},
        },
        processor=MORE_KINDS["gemma-4-unified"].processor,
        images=MORE_KINDS["gemma-4-unified"].images,
        tokens=GEMMA_TOKENS,
    ),
}


def samples_of(seed: int, length_s: float, rate: int = RATE) -> NDArray[np.float32]:
    """Some tones that change, and noise."""
    random = np.random.default_rng(seed)
    times = np.arange(int(length_s * rate)) / rate
    tones = sum(np.sin(times * random.uniform(500, 9000) * (1 + times)) for _ in range(3))
    return (
        np.round((tones * 0.2 + random.normal(0, 0.05, len(times))) * 30000).clip(-32768, 32767).astype(np.float32)
        / 32768
    )


def wav(samples: NDArray[np.float32], rate: int = RATE) -> bytes:
    """A file of 16 bits a sample."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, 0, "NONE", ""))
        writer.writeframes((samples * 32768).astype("<i2").tobytes())
    return file.getvalue()


def write_sound_model(folder: Path, kind: str) -> Any:
    """A folder with everything that a server needs, and the network it was written from."""
    return write_pretrained_vision_model(folder, SOUND_KINDS[kind])


VOXTRAL = Kind(
    name="Voxtral",
    config={
        "text_config": {**LLAMA, "vocab_size": 48 + 256, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8},
        "audio_config": {
            "model_type": "voxtral_encoder",
            "vocab_size": 8,
            "num_mel_bins": 8,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        },
        "audio_token_id": 24,
    },
    processor={"processor_class": "VoxtralProcessor"},
    images={**EXTRACTOR, "processor_class": "VoxtralProcessor"},
    renames=WRITTEN,
)


def write_voxtral(folder: Path) -> Any:
    """Its tokenizer is in Mistral's own format, of single bytes."""
    model = write_pretrained_vision_model(folder, VOXTRAL)
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json"):
        (folder / name).unlink()
    special = {**dict(enumerate(FIRST_TOKENS)), 24: "[AUDIO]", 25: "[BEGIN_AUDIO]"}
    named = [{"rank": i, "token_str": special.get(i, f"<SPECIAL_{i}>"), "is_control": True} for i in range(48)]
    words = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)]
    config = {
        "pattern": r"[^\r\n]+|\s",
        "num_vocab_tokens": 256,
        "default_vocab_size": 48 + 256,
        "default_num_special_tokens": 48,
        "version": "v7",
    }
    document = {"config": config, "vocab": words, "special_tokens": named}
    (folder / "tekken.json").write_text(json.dumps(document))
    return model
