"""read_processor: the processor of images that an encoder needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.llm.images.grid_processor import read_grid_processor
from flambeau.llm.images.image_processor import ImageProcessor, read_fixed_processor
from flambeau.llm.images.pretrained_processor import read_pretrained_processor
from flambeau.llm.models.vision_architecture import (
    GridArchitecture,
    PretrainedVision,
    SiglipArchitecture,
    VisionArchitecture,
)


def read_processor(folder: Path, arch: VisionArchitecture, settings: Mapping[str, Any] | None = None) -> ImageProcessor:
    """Raises CheckpointError for settings in the checkpoint's folder, or other ones, that are not known."""
    if isinstance(arch, GridArchitecture):
        return read_grid_processor(folder, arch, settings)
    if isinstance(arch, PretrainedVision):
        return read_pretrained_processor(folder, arch)
    assert isinstance(arch, SiglipArchitecture)
    return read_fixed_processor(folder, arch, settings)
