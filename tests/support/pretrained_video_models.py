"""The tiny models that read videos, too, with their settings of videos."""

from __future__ import annotations

from dataclasses import replace

from support.later_vision_models import LATER_KINDS
from support.more_vision_models import MORE_KINDS
from support.omni_models import OMNI_KINDS
from support.pretrained_vision_models import COLORS, GLM_IMAGES, KINDS, LAST_ID, SIDE, SQUARE

GLM_NAMES = ("<|begin_of_video|>", "<|video|>", "<|end_of_video|>", "<|begin_of_image|>", "<|end_of_image|>")
GLM_VIDEOS = {**GLM_IMAGES, "size": {"shortest_edge": 14 * 14 * 4, "longest_edge": 14 * 14 * 2 * 60}}
GEMMA_VIDEOS = {
    "video_processor_type": "Gemma4VideoProcessor",
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 70,
    "num_frames": 4,
}
_INTERNVL, _ONEVISION, _SMOLVLM = KINDS["internvl"], KINDS["llava-onevision"], KINDS["smolvlm"]
_GLM, _GLM_MOE, _GLM_4_6, _GEMMA_4 = KINDS["glm-4v"], KINDS["glm-4v-moe"], KINDS["glm-4.6v"], MORE_KINDS["gemma-4"]
_UNIFIED = MORE_KINDS["gemma-4-unified"]
VIDEO_KINDS = {
    **OMNI_KINDS,
    "llava-next-video": LATER_KINDS["llava-next-video"],
    "lfm-3-vl": LATER_KINDS["lfm-3-vl"],
    "internvl": replace(
        _INTERNVL,
        videos={"video_processor_type": "InternVLVideoProcessor", "size": SQUARE, "num_frames": 4, **COLORS},
        video_marker="<video>",
    ),
    "llava-onevision": replace(
        _ONEVISION,
        videos={"video_processor_type": "LlavaOnevisionVideoProcessor", "size": SQUARE, **COLORS},
        video_marker="<video>",
    ),
    "smolvlm": replace(
        _SMOLVLM,
        videos={
            "video_processor_type": "SmolVLMVideoProcessor",
            "max_image_size": {"longest_edge": SIDE},
            "video_sampling": {"fps": 2, "max_frames": 6, "video_size": {"longest_edge": 2 * SIDE}},
            **COLORS,
        },
        video_marker="<video>",
    ),
    "glm-4v": replace(
        _GLM,
        videos={**GLM_VIDEOS, "video_processor_type": "Glm4vVideoProcessor"},
        video_marker="<|begin_of_video|><|video|><|end_of_video|>",
        last=GLM_NAMES,
    ),
    "glm-4v-moe": replace(
        _GLM_MOE,
        videos={**GLM_VIDEOS, "video_processor_type": "Glm4vVideoProcessor"},
        video_marker="<|begin_of_video|><|video|><|end_of_video|>",
        last=GLM_NAMES,
    ),
    "glm-4.6v": replace(
        _GLM_4_6,
        videos={**GLM_VIDEOS, "video_processor_type": "Glm46VVideoProcessor"},
        video_marker="<|begin_of_video|><|video|><|end_of_video|>",
        last=GLM_NAMES,
    ),
    "gemma-4": replace(
        _GEMMA_4,
        processor={**_GEMMA_4.processor, "video_processor": GEMMA_VIDEOS},
        video_marker="<|video|>",
        config={**_GEMMA_4.config, "video_token_id": LAST_ID},
        last=("<|video|>",),
    ),
    "gemma-4-unified": replace(
        _UNIFIED,
        processor={
            **_UNIFIED.processor,
            "video_processor": {**GEMMA_VIDEOS, "video_processor_type": "Gemma4UnifiedVideoProcessor"},
        },
        video_marker="<|video|>",
        config={**_UNIFIED.config, "video_token_id": LAST_ID},
        last=("<|video|>",),
    ),
}
