"""load_model: checkpoint files → a network, without a conversion step.

The network is built on the meta device, which fixes the name, shape and type of every parameter. Then each tensor of
the files goes to the parameter of its name. On the CPU, in the file's own type, a parameter is the mapped file itself;
otherwise the tensor is copied straight to its device and type.

What is applied to the network while it is loaded:

- `build(arch)` makes the network on the meta device, in the given type. The default uses quantized layers if
  config.json says that the files do. A rank's part of a network is built from the architecture of that part.
- `shard(name, tensor)` cuts this rank's part out of a tensor. Names and tensors are those of a Hugging Face checkpoint
  whatever the file has: queries, keys, values, gate and up apart, and every expert (`…experts.3.up_proj.weight`). It is
  first called with tensors on the meta device, to check shapes.
- `arrived(name, module)` is called as soon as a module has all its parameters, and may return a replacement: a network
  that is quantized on load never takes the memory of the original.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from flambeau.llm.checkpoints.absent_weights import absent_value, may_lack
from flambeau.llm.checkpoints.gguf_architecture import gguf_architecture
from flambeau.llm.checkpoints.gguf_weights import open_gguf
from flambeau.llm.checkpoints.layer_formats import NO_FORMS, KeptForms
from flambeau.llm.checkpoints.loading_progress import Progress, progress_of
from flambeau.llm.checkpoints.mxfp4 import read_mxfp4
from flambeau.llm.checkpoints.parameter_filler import Arrived, fill, set_parameter
from flambeau.llm.checkpoints.parameter_map import Placement, ShardFunction, listed, map_weights, parameters_of
from flambeau.llm.checkpoints.quantization_methods import as_unpacked, is_packed, unpack_weights
from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile, open_weights
from flambeau.llm.config import Quantization
from flambeau.llm.errors import CheckpointError, InvalidConfig
from flambeau.llm.gguf_header import gguf_path, is_gguf, read_model_header
from flambeau.llm.json_files import read_object
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.config_keys import DUAL_CHUNKS
from flambeau.llm.models.embeddings import NarrowEmbedding, like_embeddings
from flambeau.llm.models.families.config_parts import OUTPUTS
from flambeau.llm.models.families.renames import Renames
from flambeau.llm.models.hugging_face import from_hugging_face, read_config, read_hugging_face
from flambeau.llm.models.meta_device import on_meta_device
from flambeau.llm.models.mistral_params import from_mistral, is_mistral
from flambeau.llm.models.moe import Experts
from flambeau.llm.models.presets import from_meta, preset
from flambeau.llm.models.tensor_names import canonical_name
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.models.vision_architecture import PretrainedVision
from flambeau.llm.quantize.quantizer import ExpertStack
from flambeau.llm.quantize.quantizer import build as build_network

logger = logging.getLogger(__name__)

REQUANTIZED = (
    "%s: its weights are quantized already, and are quantized anew to %s; leave quantization out to keep those of the "
    "file wherever kernels multiply them"
)

NARROW = ({torch.bfloat16}, {torch.float16})

Build = Callable[[Architecture], Transformer]


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    build: Build = build_network,
    shard: ShardFunction | None = None,
    arrived: Arrived | None = None,
    arch: Architecture | None = None,
    keeps_types: bool = False,
    forms: KeptForms = NO_FORMS,
    quantization: Quantization | None = None,
) -> Transformer:
    """The network of a folder or file, ready to run; the default type is that of the embeddings in the file.

    `arch` describes the files if their config.json is not to be read. With `keeps_types`, linear layers and experts
    arrive in the type of the files if the network's represents it exactly; those that `arrived` does not replace are
    converted, and embeddings stay. `quantization` is what `arrived` makes of layers, for the log.
    """
    path = Path(path)
    files = given = open_files(path)
    arch = arch or read_declared(path, files)
    if is_packed(arch, forms):
        unpacked = unpack_weights(files, arch, forms)
        files, arch = unpacked.files, as_unpacked(arch, unpacked.settings)
        if quantization is not None and unpacked.message and unpacked.settings is None:
            logger.info(REQUANTIZED, path, quantization)
        elif unpacked.message:
            logger.log(logging.INFO if unpacked.is_smaller else logging.WARNING, "%s: %s", path, unpacked.message)
    files = read_mxfp4(files)
    warn_of_differences(path, arch, files)
    with on_meta_device(dtype or embedding(given, arch.renames).dtype):
        model = build(arch).eval().requires_grad_(False)
    placements = map_weights(model, arch, files, shard)
    own = like_embeddings(model.model.embed_tokens).dtype
    if keeps_types and arrived is not None:
        keep_types(model, placements)
        arrived = partial(arrived_or_converted, arrived, own)
    if model.lm_head is None:
        check_tied(given, arch.renames)
    fill_absent(model, arch, placements, torch.device(device))
    fill(model, placements, torch.device(device), progress or progress_of(path.name), arrived)
    model.rotation.make_tables(torch.device(device))
    return model


def warn_of_differences(path: Path, arch: Architecture, files: list[WeightFile]) -> None:
    """Log what of a checkpoint has no effect here, or another."""
    if arch.unknown_keys:
        logger.warning(
            "config.json of %s has keys that are not known for this family and have no effect: %s",
            path,
            ", ".join(arch.unknown_keys),
        )
    if arch.source.get(DUAL_CHUNKS):
        logger.warning(
            "%s: sequences end after %d tokens, because longer ones need dual chunk attention, which is not supported",
            path,
            arch.max_length,
        )
    if arch.unused and (
        outputs := [stored.name for file in files for stored in file if re.search(OUTPUTS, stored.name)]
    ):
        logger.warning(
            "%s: %d tensors of what speaks or paints are left out: the model writes text only", path, len(outputs)
        )
    if arch.unused and arch.vision is None and arch.sounds is None:
        unused = [stored.name for file in files for stored in file if re.search(arch.unused, stored.name)]
        if unused:
            logger.warning(
                "%s: %d tensors are left out, as those of pictures or of further tokens: %s",
                path,
                len(unused),
                listed(unused),
            )


def read_architecture(path: Path, forms: KeptForms = NO_FORMS) -> Architecture:
    """The architecture of a checkpoint, and the quantization that its network will have."""
    arch = read_declared(path)
    if not is_packed(arch, forms):
        return arch
    return as_unpacked(arch, unpack_weights(open_files(path), arch, forms).settings)


def open_files(path: Path) -> list[WeightFile]:
    """The weight files of a folder, or one file."""
    return open_gguf(path) if is_gguf(path) else open_weights(path)


def read_declared(path: Path, files: list[WeightFile] | None = None) -> Architecture:
    """The architecture from a GGUF file, config.json, params.json or the folder's name, in this order."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; name the folder of a checkpoint or one of its files")
    folder = path.parent if path.is_file() else path
    if not any(folder.iterdir()):
        raise CheckpointError(f"{path} is an empty folder; put the files of a checkpoint into it")
    check_kind(folder)
    gguf = gguf_path(path)
    if gguf is not None:
        return gguf_architecture(read_model_header(gguf))
    if (folder / "config.json").is_file():
        arch = read_hugging_face(folder)
        is_whole = isinstance(arch.vision, PretrainedVision) or arch.sounds is not None
        return with_own_head(arch, files or open_files(path)) if is_whole else arch
    if (folder / "params.json").is_file():
        files = open_weights(path) if files is None else files
        params = read_object(folder / "params.json", CheckpointError)
        return from_mistral(params) if is_mistral(params) else from_meta(params, vocab_size=embedding(files).shape[0])
    return preset(folder.resolve().name)


def with_own_head(arch: Architecture, files: list[WeightFile]) -> Architecture:
    """A network whose head is tied if the files have none; what config.json says of it differs between classes."""
    names = (canonical_name(stored.name, arch.renames) for file in files for stored in file)
    return replace(arch, tied_embeddings=not any(name.startswith("lm_head.") for name in names))


def unsupported_reason(path: Path) -> str | None:
    """Why the engine's own network cannot be that of a Hugging Face folder; None: it can, or it is no such folder."""
    if not (path / "config.json").is_file() or gguf_path(path) is not None:
        return None
    check_kind(path)
    try:
        from_hugging_face(read_config(path))
    except InvalidConfig:
        return None
    except CheckpointError as error:
        return str(error)
    return None


def check_kind(folder: Path) -> None:
    """Raise for what looks like a model and is not one, or not in a known form."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = read_object(adapter, CheckpointError).get("base_model_name_or_path") or "another model"
        raise CheckpointError(
            f"{folder} holds an adapter of {base} (adapter_config.json) and not a model; serve that model, with the "
            f"adapter in its model-config.yaml: `handler: {{lora_adapters: {{NAME: {folder}}}}}`, or with "
            f"`flambeau llm serve FOLDER --lora NAME={folder}`"
        )


def keep_types(model: nn.Module, placements: list[Placement]) -> None:
    """Give empty linear layers, experts and embeddings of float32 the type of their tensors, if that has 16 bits."""
    stored: defaultdict[str, set[torch.dtype]] = defaultdict(set)
    for placement in placements:
        stored[placement.owner].add(placement.stored.dtype)
    for name, types in stored.items():
        layer = model.get_submodule(name)
        is_wide = all(parameter.dtype == torch.float32 for parameter in layer.parameters(recurse=False))
        if isinstance(layer, nn.Linear | nn.Embedding | Experts) and is_wide and types in NARROW:
            convert_parameters(layer, next(iter(types)))


def arrived_or_converted(arrived: Arrived, dtype: torch.dtype, name: str, module: nn.Module) -> nn.Module | None:
    """What `arrived` returns; what stays gets the network's type, and embeddings give it."""
    other = arrived(name, module)
    if other is not None:
        return other
    if isinstance(module, nn.Linear | Experts):
        convert_parameters(module, dtype)
        for stack in module.children():
            if isinstance(stack, ExpertStack):
                stack.dtype = dtype
    elif isinstance(module, nn.Embedding) and module.weight.dtype != dtype:
        return NarrowEmbedding(module.weight, dtype)
    return None


def convert_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert a module's own parameters; quantized weights of experts, which may be fp8, are not its own."""
    for name, parameter in [*module.named_parameters(recurse=False)]:
        setattr(module, name, nn.Parameter(parameter.detach().to(dtype), requires_grad=False))


def fill_absent(model: nn.Module, arch: Architecture, placements: list[Placement], device: torch.device) -> None:
    """Make the parameters that the files need not have, and do not."""
    if not arch.zeros and not arch.sinusoids:
        return
    placed = {placement.parameter for placement in placements}
    for name, parameter in parameters_of(model).items():
        if name not in placed and may_lack(arch, name):
            owner, _, leaf = name.rpartition(".")
            set_parameter(model.get_submodule(owner), leaf, absent_value(arch, name, parameter, device))


def embedding(files: list[WeightFile], renames: Renames = ()) -> StoredTensor:
    """The stored embeddings, which every network has."""
    for file in files:
        for stored in file:
            if canonical_name(stored.name, renames) == "model.embed_tokens.weight":
                return stored
    raise CheckpointError(
        f"{files[0].path} holds no model.embed_tokens.weight; is it the checkpoint of a language model?"
    )


def check_tied(files: list[WeightFile], renames: Renames) -> None:
    """Raise if config.json ties the output to the embeddings, but the files have other weights for it."""
    heads = [stored for file in files for stored in file if canonical_name(stored.name, renames) == "lm_head.weight"]
    tokens = embedding(files, renames)
    if any(head.shape != tokens.shape or not torch.equal(head.read(), tokens.read()) for head in heads):
        raise CheckpointError(
            f"{heads[0].file.path} has an lm_head.weight that differs from the embeddings, and config.json ties them; "
            "set tie_word_embeddings to false, or remove lm_head.weight from the file"
        )
