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
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn

from flambeau.llm.checkpoints.absent_weights import absent_value, may_lack
from flambeau.llm.checkpoints.gguf_architecture import gguf_architecture
from flambeau.llm.checkpoints.gguf_weights import open_gguf
from flambeau.llm.checkpoints.mxfp4 import keep_mxfp4, read_mxfp4
from flambeau.llm.checkpoints.parameter_map import Placement, ShardFunction, as_is, listed, map_weights, parameters_of
from flambeau.llm.checkpoints.quantization_methods import as_unpacked, is_mxfp4, is_packed, unpack_weights
from flambeau.llm.checkpoints.staged_copies import StagedCopies
from flambeau.llm.checkpoints.weight_files import SafetensorsFile, StoredTensor, WeightFile, open_weights
from flambeau.llm.config import Quantization
from flambeau.llm.errors import CheckpointError, InvalidConfig
from flambeau.llm.gguf_header import gguf_path, is_gguf, read_model_header
from flambeau.llm.json_files import read_object
from flambeau.llm.mapped_files import release_weight_files
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.config_keys import DUAL_CHUNKS
from flambeau.llm.models.embeddings import NarrowEmbedding, like_embeddings
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
TENSORS_AHEAD = 16  # of the one that the loader waits for, while threads copy to a GPU
RELEASE_BYTES = 1 << 28  # read between two releases of mapped files …
SMALL_BYTES = 1 << 30  # … which take a moment, and of smaller checkpoints come after the last tensor

NARROW = ({torch.bfloat16}, {torch.float16})

Build = Callable[[Architecture], Transformer]
Arrived = Callable[[str, nn.Module], nn.Module | None]


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
    keeps_blocks: bool = False,
    keeps_codes: bool = False,
    keeps_groups: bool = False,
    narrow_groups: bool = False,
    quantization: Quantization | None = None,
) -> Transformer:
    """The network of a folder or file, ready to run; the default type is that of the embeddings in the file.

    `arch` describes the files if their config.json is not to be read. With `keeps_types`, linear layers and experts
    arrive in the type of the files if the network's represents it exactly; those that `arrived` does not replace are
    converted, and embeddings stay. `quantization` is what `arrived` makes of layers, for the log. For the other options
    see `unpack_weights`.
    """
    path = Path(path)
    files = open_files(path)
    arch = arch or read_declared(path, files)
    if keeps_blocks and is_mxfp4(arch):
        files, settings = keep_mxfp4(files, arch, as_codes=keeps_codes)
        arch = as_unpacked(arch, settings)
    files = given = read_mxfp4(files)
    if is_packed(arch):
        keeps = {"keeps_blocks": keeps_blocks, "keeps_codes": keeps_codes, "keeps_groups": keeps_groups}
        unpacked = unpack_weights(files, arch, **keeps, narrow_groups=narrow_groups)
        files, arch = unpacked.files, as_unpacked(arch, unpacked.settings)
        if quantization is not None and unpacked.message and unpacked.settings is None:
            logger.info(REQUANTIZED, path, quantization)
        elif unpacked.message:
            logger.log(logging.INFO if unpacked.is_smaller else logging.WARNING, "%s: %s", path, unpacked.message)
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
    if arch.unused and arch.vision is None:
        unused = [stored.name for file in files for stored in file if re.search(arch.unused, stored.name)]
        if unused:
            logger.warning(
                "%s: %d tensors are left out, as those of pictures or of further tokens: %s",
                path,
                len(unused),
                listed(unused),
            )
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


def read_architecture(
    path: Path,
    *,
    keeps_blocks: bool = False,
    keeps_codes: bool = False,
    keeps_groups: bool = False,
    narrow_groups: bool = False,
) -> Architecture:
    """The architecture of a checkpoint, and the quantization that its network will have."""
    arch = read_declared(path)
    if keeps_blocks and is_mxfp4(arch):
        return as_unpacked(arch, keep_mxfp4(open_files(path), arch, as_codes=keeps_codes)[1])
    if not is_packed(arch):
        return arch
    keeps = {"keeps_blocks": keeps_blocks, "keeps_codes": keeps_codes, "keeps_groups": keeps_groups}
    unpacked = unpack_weights(open_files(path), arch, **keeps, narrow_groups=narrow_groups)
    return as_unpacked(arch, unpacked.settings)


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
        return with_own_head(arch, files or open_files(path)) if isinstance(arch.vision, PretrainedVision) else arch
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


def fill(
    model: nn.Module,
    placements: list[Placement],
    device: torch.device,
    progress: Progress | None,
    arrived: Arrived | None,
) -> None:
    """Copy every tensor to its parameter."""
    if arrived is not None:
        placements = largest_first(placements)
    total_bytes, done_bytes = sum(placement.num_bytes for placement in placements), 0
    missing, released_bytes = Counter(placement.owner for placement in placements), 0
    place_all = place_by_threads if device.type == "cuda" else place_one_by_one
    for placement in place_all(model, placements, device):
        missing[placement.owner] -= 1
        if arrived is not None and not missing[placement.owner]:
            replace_module(model, placement.owner, arrived)
        done_bytes += placement.num_bytes
        is_due = total_bytes > SMALL_BYTES and done_bytes - released_bytes >= RELEASE_BYTES
        if arrived is not None and is_due:
            release_weight_files()  # most of what was read has been replaced
            released_bytes = done_bytes
        if progress is not None:
            progress(done_bytes, total_bytes)


def largest_first(placements: list[Placement]) -> list[Placement]:
    """The placements by the size of their module, else in their order.

    What is made of a module on the way is as large as the module: for the largest, there is little else in memory then.
    """
    sizes = Counter[str]()
    for placement in placements:
        sizes[placement.owner] += placement.num_bytes
    return sorted(placements, key=lambda placement: -sizes[placement.owner])


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch computes with one thread meanwhile."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def place_one_by_one(model: nn.Module, placements: list[Placement], device: torch.device) -> Iterator[Placement]:
    """Fill the parameters; a placement is yielded when it is done."""
    for placement in placements:
        with one_thread():  # the file is the limit, and threads that wait for each other are slow on a busy machine
            place(model.get_submodule(placement.owner), placement, device)
        yield placement


def place_by_threads(model: nn.Module, placements: list[Placement], device: torch.device) -> Iterator[Placement]:
    """The same, in the same order, but threads copy tensors that need no change to the device."""
    waiting: deque[tuple[Placement, Future[None] | None]] = deque()
    with StagedCopies(device) as copies:
        for placement in placements:
            waiting.append((placement, start_copy(model, placement, device, copies)))
            if len(waiting) > TENSORS_AHEAD:
                yield finished(*waiting.popleft())
        while waiting:
            yield finished(*waiting.popleft())


def finished(placement: Placement, copied: Future[None] | None) -> Placement:
    """Wait for a copy."""
    try:
        if copied is not None:
            copied.result()
    except OSError as error:
        raise CheckpointError(str(error)) from error
    return placement


def start_copy(
    model: nn.Module, placement: Placement, device: torch.device, copies: StagedCopies
) -> Future[None] | None:
    """Allocate a parameter, if it is not there, and start to fill it or a part of it; None: it is filled."""
    module, leaf = model.get_submodule(placement.owner), placement.parameter.rpartition(".")[2]
    target: Tensor = getattr(module, leaf)
    stored = placement.stored
    if placement.cut is not as_is or stored.dtype != target.dtype or not isinstance(stored.file, SafetensorsFile):
        place(module, placement, device)
        return None
    value = torch.empty(target.shape, dtype=target.dtype, device=device) if target.is_meta else target.detach()
    part = value[placement.region] if placement.region else value
    if not part.is_contiguous() or not part.nbytes:
        place(module, placement, device)
        return None
    set_parameter(module, leaf, value)
    return copies.start(stored.file.path, stored.file.offset(stored.name), part)


def place(module: nn.Module, placement: Placement, device: torch.device) -> None:
    """Fill a parameter or a part of it; the first part allocates it."""
    leaf = placement.parameter.rpartition(".")[2]
    target: Tensor = getattr(module, leaf)
    tensor = placement.cut(placement.stored.read())
    if not placement.region:
        value = tensor.to(device, target.dtype).contiguous()
    else:
        is_empty = target.is_meta
        value = torch.empty(target.shape, dtype=target.dtype, device=device) if is_empty else target.detach()
        value[placement.region].copy_(tensor)
    set_parameter(module, leaf, value)


def set_parameter(module: nn.Module, leaf: str, value: Tensor) -> None:
    """Replace a parameter, or a buffer."""
    is_parameter = isinstance(getattr(module, leaf), nn.Parameter)
    setattr(module, leaf, nn.Parameter(value, requires_grad=False) if is_parameter else value)


def replace_module(model: nn.Module, name: str, arrived: Arrived) -> None:
    """Replace a complete module if `arrived` returns another."""
    other = arrived(name, model.get_submodule(name))
    if other is not None:
        model.set_submodule(name, other)


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


Progress = Callable[[int, int], None]  # bytes done, total bytes

WIDTH = 30
INTERVAL_S = 0.1


class LoadingBar:
    """Redraws one line, at most ten times a second."""

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name, self._stream = name, stream or sys.stderr
        self._drawn_at = 0.0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if done_bytes < total_bytes and now - self._drawn_at < INTERVAL_S:
            return
        self._drawn_at = now
        self._stream.write("\r" + bar(self._name, done_bytes, total_bytes))
        if done_bytes >= total_bytes:
            self._stream.write("\n")
        self._stream.flush()


def bar(name: str, done_bytes: int, total_bytes: int) -> str:
    """One line: `loading tiny  [#####.....]  50%  1.2 of 2.4 GB`."""
    part = done_bytes / total_bytes if total_bytes else 1.0
    filled = round(part * WIDTH)
    return f"loading {name}  [{'#' * filled}{'.' * (WIDTH - filled)}]  {part:4.0%}  {amount(done_bytes, total_bytes)}"


def amount(done_bytes: int, total_bytes: int) -> str:
    unit, size = ("GB", 1e9) if total_bytes >= 1e9 else ("MB", 1e6)
    return f"{done_bytes / size:.1f} of {total_bytes / size:.1f} {unit}"


LOG_INTERVAL_S = 10.0


class LoadingLog:
    """Logs a line every ten seconds: nothing for a model that is loaded sooner."""

    def __init__(self, name: str) -> None:
        self._name, self._logged_at = name, time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            logger.info("loading %s: %s", self._name, amount(done_bytes, total_bytes))


def progress_of(name: str) -> Progress:
    """A bar if stderr is a terminal, else lines of the log."""
    return LoadingBar(name) if sys.stderr.isatty() else LoadingLog(name)
