"""Tiny random models that read images, videos and sounds in one chat (Qwen-Omni)."""

from __future__ import annotations

from typing import Any

from support.pretrained_vision_models import GLM_IMAGES, ID, PATCH, TEXT, Kind

SOUND = ID["<|audio|>"]
NAMES = {
    "image_token": "<image>",
    "video_token": "<video>",
    "audio_token": "<|audio|>",
    "vision_bos_token": "<img>",
    "vision_eos_token": "</img>",
    "audio_bos_token": "<start_of_audio>",
    "audio_eos_token": "<end_of_audio>",
}
WHISPER: dict[str, Any] = {
    "num_mel_bins": 8,
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "output_dim": 64,
}
EXTRACTOR = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "sampling_rate": 16_000}
IMAGES = {
    **GLM_IMAGES,
    **EXTRACTOR,
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 14 * 14 * 4, "longest_edge": 14 * 14 * 40},
}
VIDEO_SIZES = {"size": {"shortest_edge": 14 * 14 * 4, "longest_edge": 14 * 14 * 20}}
DECODER = {**TEXT, "hidden_size": 64, "head_dim": 16}
TOWER = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": PATCH,
    "out_hidden_size": 64,
}
IDS = {"vision_start_token_id": ID["<img>"], "audio_start_token_id": ID["<start_of_audio>"]}
OMNI_KINDS = {
    "qwen-2.5-omni": Kind(
        name="Qwen2_5OmniThinker",
        config={
            "text_config": {
                **DECODER,
                "model_type": "qwen2_5_omni_text",
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                **TOWER,
                "model_type": "qwen2_5_omni_vision_encoder",
                "window_size": 4 * PATCH,
                "fullatt_block_indexes": [1],
            },
            "audio_config": {**WHISPER, "model_type": "qwen2_5_omni_audio_encoder", "max_source_positions": 100},
            "audio_token_index": SOUND,
            "image_token_index": ID["<image>"],
            "video_token_index": ID["<video>"],
            "position_id_per_seconds": 5,
            **IDS,
        },
        processor={"processor_class": "Qwen2_5OmniProcessor"},
        images={**IMAGES, "chunk_length": 2},
        marker="<img><image></img>",
        sound_marker="<start_of_audio><|audio|><end_of_audio>",
        video_marker="<img><video></img>",
        tokens=NAMES,
    ),
    "qwen-3-omni": Kind(
        name="Qwen3OmniMoeThinker",
        config={
            "text_config": {
                **DECODER,
                "model_type": "qwen3_omni_moe_text",
                "moe_intermediate_size": 24,
                "num_experts_per_tok": 2,
                "num_experts": 6,
                "mlp_only_layers": [1],
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [3, 3, 2],
                    "mrope_interleaved": True,
                    "interleaved": True,
                },
            },
            "vision_config": {
                **TOWER,
                "model_type": "qwen3_omni_moe_vision_encoder",
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            "audio_config": {
                **WHISPER,
                "model_type": "qwen3_omni_moe_audio_encoder",
                "num_mel_bins": 16,
                "n_window": 50,
                "n_window_infer": 200,
                "downsample_hidden_size": 4,
            },
            "audio_token_id": SOUND,
            "image_token_id": ID["<image>"],
            "video_token_id": ID["<video>"],
            "position_id_per_seconds": 7,
            **IDS,
        },
        processor={"processor_class": "Qwen3OmniMoeProcessor"},
        images={**IMAGES, "feature_size": 16},
        marker="<img><image></img>",
        sound_marker="<start_of_audio><|audio|><end_of_audio>",
        video_marker="<img><video></img>",
        tokens=NAMES,
    ),
}
