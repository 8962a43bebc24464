"""Tensor parallelism by DeepSpeed, for handlers that were written for it."""

from __future__ import annotations

import abc
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.errors import HandlerError
from flambeau.handlers.base import BaseHandler
from flambeau.torchserve.handlers.optional_imports import need

if TYPE_CHECKING:
    from flambeau.worker.context import Context

CHECKPOINT_SUFFIXES = (".bin", ".pt", ".ptn")


class BaseDeepSpeedHandler(BaseHandler, abc.ABC):
    """One rank of a model that DeepSpeed splits."""

    def initialize(self, context: Context) -> None:
        """Take the device of this process's rank."""
        self.device: Any = int(os.environ.get("LOCAL_RANK") or 0)


def get_ds_engine(model: Any, ctx: Context) -> Any:
    """The model as an engine, set up by the `deepspeed` section of model-config.yaml."""
    section = ctx.model_yaml_config.get("deepspeed")
    if section is None:
        raise HandlerError(f"{ctx.model_name} has no deepspeed config in model config yaml file")
    folder, model_path = Path(ctx.system_properties["model_dir"]), ctx.model_yaml_config["handler"]["model_path"]
    config = folder / section["config"] if "config" in section else None
    if config is not None and not config.is_file():
        raise HandlerError(f"{ctx.model_name} has no deepspeed config file {config}")
    deepspeed = need("deepspeed", "pip install deepspeed")
    checkpoint = folder / section["checkpoint"] if "checkpoint" in section else None
    if checkpoint is not None:
        create_checkpoints_json(model_path, checkpoint)
    return deepspeed.init_inference(
        model,
        config=str(config) if config else None,
        base_dir=model_path,
        checkpoint=str(checkpoint) if checkpoint else None,
    )


def create_checkpoints_json(model_path: str | Path, checkpoints_json: str | Path) -> None:
    """List the checkpoint files below a folder, in the way DeepSpeed reads them."""
    files = sorted(str(p) for p in Path(model_path).rglob("*") if p.is_file() and p.suffix in CHECKPOINT_SUFFIXES)
    Path(checkpoints_json).write_text(json.dumps({"type": "ds_model", "checkpoints": files, "version": 1.0}))
