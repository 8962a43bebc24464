"""Handlers that decode and resize images with NVIDIA DALI, for models with a serialized pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flambeau.errors import HandlerError
from flambeau.handlers.request_rows import decode_base64, value_of
from flambeau.handlers.vision_handlers import ImageClassifier, VisionHandler
from flambeau.torchserve.handlers.functions import need

if TYPE_CHECKING:
    from flambeau.worker.context import Context

REMEDY = "pip install nvidia-dali-cuda120, or use image_classifier, which does the same on any machine"
REQUIRED = ("batch_size", "num_threads", "device_id", "seed")


class DALIHandler(VisionHandler):
    """Preprocesses images with the pipeline that the `dali` section of model-config.yaml names."""

    def initialize(self, context: Context) -> None:
        super().initialize(context)
        self.pipeline_of_images = get_dali_pipeline(context)

    def preprocess(self, data: Sequence[Any]) -> Any:
        """Encoded images → one tensor."""
        outputs = self.pipeline_of_images.run(source=[to_array(value_of(row)) for row in data])[0]
        images = [torch.as_tensor(outputs.at(i)) for i in range(len(data))]
        return torch.stack(images).to(self.device)


class DALIImageClassifier(DALIHandler, ImageClassifier):
    """`image_classifier` with DALI's preprocessing."""


def get_dali_pipeline(ctx: Context) -> Any:
    """Load the serialized pipeline of a model."""
    section = read_section(ctx.model_yaml_config.get("dali"), ctx.model_name)
    file = Path(ctx.system_properties["model_dir"]) / section["pipeline_file"]
    if not file.is_file():
        raise RuntimeError(f"Missing dali pipeline file: {file}")
    pipeline = need("nvidia.dali.pipeline", REMEDY).Pipeline
    settings = {key: section[key] for key in REQUIRED}
    return pipeline.deserialize(filename=str(file), prefetch_queue_depth=1, **settings)


def read_section(section: Any, model: str) -> Mapping[str, Any]:
    """The `dali` section; raises HandlerError if a key is missing."""
    if not isinstance(section, Mapping):
        raise HandlerError(f"{model} has no dali config in model config yaml file")
    if missing := [key for key in (*REQUIRED, "pipeline_file") if key not in section]:
        raise HandlerError(
            f"the dali section of {model} lacks {', '.join(missing)}: this server has no default pipeline; "
            "serialize yours with pipeline.serialize(filename=…), pack it as an extra file and name it; or use "
            "image_classifier"
        )
    return section


def to_array(value: Any) -> Any:
    """The bytes of an encoded image as an array."""
    import numpy as np

    if isinstance(value, str):
        value = decode_base64(value)
    return np.frombuffer(value, dtype=np.uint8) if isinstance(value, (bytes, bytearray, memoryview)) else value
