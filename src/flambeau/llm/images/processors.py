"""read_processor and read_video_processor: the processors of images and of videos that an encoder needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.images.grid_processor import read_grid_processor
from flambeau.llm.images.grid_video_processor import read_grid_video_processor
from flambeau.llm.images.image_processor import ImageProcessor, read_fixed_processor
from flambeau.llm.images.pretrained_processor import read_pretrained_processor
from flambeau.llm.images.pretrained_video_processor import read_pretrained_video_processor
from flambeau.llm.images.video_processor import VideoProcessor
from flambeau.llm.models.vision_architecture import (
    GridArchitecture,
    PretrainedVision,
    SiglipArchitecture,
    VisionArchitecture,
)

logger = logging.getLogger(__name__)


def read_processor(folder: Path, arch: VisionArchitecture, settings: Mapping[str, Any] | None = None) -> ImageProcessor:
    """Raises CheckpointError for settings in the checkpoint's folder, or other ones, that are not known."""
    if isinstance(arch, GridArchitecture):
        return read_grid_processor(folder, arch, settings)
    if isinstance(arch, PretrainedVision):
        return read_pretrained_processor(folder, arch)
    assert isinstance(arch, SiglipArchitecture)
    return read_fixed_processor(folder, arch, settings)


def read_video_processor(folder: Path, arch: VisionArchitecture) -> VideoProcessor | None:
    """None: the model reads no videos, or their settings are not known, which a warning says."""
    try:
        if isinstance(arch, GridArchitecture):
            return read_grid_video_processor(folder, arch)
        if isinstance(arch, PretrainedVision) and arch.reader.videos is not None:
            return read_pretrained_video_processor(folder, arch)
        return None
    except CheckpointError as error:
        logger.warning("%s: requests with videos are refused: %s", folder, error)
        return None
