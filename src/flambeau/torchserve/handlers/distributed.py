"""Base handlers for PiPPy pipelines and DeepSpeed tensor parallelism."""

from __future__ import annotations

import abc
import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flambeau.errors import HandlerError
from flambeau.handlers.base import BaseHandler
from flambeau.torchserve.handlers.functions import need

if TYPE_CHECKING:
    from flambeau.worker.context import Context

REMEDY = "pip install torchpippy, or use torch.distributed.pipelining in a handler of your own"


class BasePippyHandler(BaseHandler, abc.ABC):
    """One stage of a pipeline: its rank, its device and its connection to the other ranks."""

    def initialize(self, context: Context) -> None:
        """Join the ranks that torchrun started."""
        self.local_rank, self.world_size = read_rank(os.environ)
        self.device: Any = self.local_rank % num_devices()
        initialize_rpc_workers(self.local_rank, self.world_size, context)


def initialize_rpc_workers(local_rank: int, world_size: int, ctx: Context) -> None:
    """Connect the ranks by torch RPC; the `pippy` section sets the timeout and threads."""
    from torch.distributed import rpc

    section = section_of(ctx.model_yaml_config, "pippy", "rpc_timeout", "num_worker_threads")
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=section["num_worker_threads"], rpc_timeout=section["rpc_timeout"]
    )
    devices = num_devices()
    for rank in range(world_size):
        options.set_device_map(f"worker{rank}", {local_rank % devices: rank % devices})
    join: Any = rpc.init_rpc
    join(f"worker{local_rank}", rank=local_rank, world_size=world_size, rpc_backend_options=options)


def get_pipeline_driver(model: Any, world_size: int, ctx: Context) -> Any:
    """Split the model into equal stages over the ranks; with `model_type: HF`, return the model itself."""
    section = section_of(ctx.model_yaml_config, "pippy", "input_names", "model_type")
    handler = section_of(ctx.model_yaml_config, "handler", "model_path")
    index_file = find_index(Path(handler["model_path"]), handler.get("index_filename"))
    pippy = need("pippy", REMEDY)
    hugging_face = need("pippy.hf", REMEDY) if section["model_type"] == "HF" else None
    model.eval()
    driver, _ = pippy.all_compile(
        model,
        num_ranks=world_size,
        num_chunks=section.get("chunks", 1),
        schedule="FillDrain",
        split_policy=pippy.split_into_equal_size(world_size),
        tracer=hugging_face.PiPPyHFTracer() if hugging_face else None,
        concrete_args=constants_of(model, section["input_names"], is_hugging_face=hugging_face is not None),
        index_filename=index_file,
        checkpoint_prefix=None,
    )
    if hugging_face is None:
        return driver
    hugging_face.inject_pipeline_forward(model, driver)
    return model


def constants_of(model: Any, input_names: list[str], *, is_hugging_face: bool) -> dict[str, Any]:
    """The arguments of `forward` that keep their defaults while it is traced."""
    parameters = inspect.signature(model.forward).parameters.values()
    constants = {p.name: p.default for p in parameters if p.name not in input_names}
    if is_hugging_face and "bloom" in str(type(model)):
        constants.setdefault("deprecated_arguments", {})
    return constants


def find_index(model_path: Path, name: str | None) -> str | None:
    """The index file of a sharded checkpoint, if the model names one."""
    if name is None:
        return None
    if not (model_path / name).is_file():
        raise HandlerError(f"Index file '{model_path / name}' not found: see index_filename in model-config.yaml")
    return str(model_path / name)


def section_of(config: Mapping[str, Any], name: str, *keys: str) -> Mapping[str, Any]:
    """A required section of model-config.yaml with these keys."""
    section = config.get(name)
    if not isinstance(section, Mapping):
        raise HandlerError(f"Missing '{name}' key in YAML config: a section with {', '.join(keys)}")
    for key in keys:
        if key not in section:
            raise HandlerError(f"Missing '{key}' key in YAML config, in section '{name}'")
    return section


def read_rank(environment: Mapping[str, str]) -> tuple[int, int]:
    """(local rank, world size) of this process."""
    try:
        return int(environment["LOCAL_RANK"]), int(environment["WORLD_SIZE"])
    except KeyError as error:
        raise HandlerError(f"{error} is not set: a PiPPy model needs parallelType: pp, which starts torchrun") from None


def num_devices() -> int:
    """The number of GPUs that the ranks share."""
    if (devices := torch.cuda.device_count()) == 0:
        raise HandlerError("a PiPPy model needs GPUs, and this host has none")
    return devices


if TYPE_CHECKING:
    from flambeau.worker.context import Context

CHECKPOINT_SUFFIXES = (".bin", ".pt", ".ptn")


class BaseDeepSpeedHandler(BaseHandler, abc.ABC):
    """One rank of a model that DeepSpeed shards."""

    def initialize(self, context: Context) -> None:
        self.device: Any = int(os.environ.get("LOCAL_RANK") or 0)


def get_ds_engine(model: Any, ctx: Context) -> Any:
    """Wrap the model in a DeepSpeed engine, configured by the `deepspeed` section."""
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
    """Write the list of checkpoint files below a folder in DeepSpeed's format."""
    files = sorted(str(p) for p in Path(model_path).rglob("*") if p.is_file() and p.suffix in CHECKPOINT_SUFFIXES)
    Path(checkpoints_json).write_text(json.dumps({"type": "ds_model", "checkpoints": files, "version": 1.0}))
