"""Checkpoints: files → a network, with no conversion step before.

A network is built without memory (on the "meta" device), which settles the name, shape and type of every parameter.
Then the tensors of the files are taken one by one and each is handed to the parameter of its name: on the CPU, in the
file's own type, a parameter is the mapped file itself; otherwise the tensor goes straight to its device and type.

What is applied to the network while it is loaded hooks in here:

- `build(arch)` makes the network, in the type asked for and on the meta device; the usual one has quantized layers
  where config.json says that the files do. A share of a network is built from the architecture of that share.
- `shard(name, tensor)` cuts this process's share out of a tensor. Whatever the file has, names and tensors are those
  of a Hugging Face checkpoint: queries, keys, values, gate and up apart, and every expert (`…experts.3.up_proj.weight`)
  too. It is first called with tensors of the meta device, to check shapes.
- `arrived(name, module)` is called as soon as a module has all its parameters, and may give another in its place:
  quantized on load, a network never takes the memory of the whole one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from flambeau.llm.checkpoints.blank import blank
from flambeau.llm.checkpoints.fitting import Placement, Shard, fit
from flambeau.llm.checkpoints.loading_bar import Progress, terminal_bar
from flambeau.llm.checkpoints.weight_files import Stored, WeightFile, open_weights
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.config_values import read_json
from flambeau.llm.models.hugging_face import read_hugging_face
from flambeau.llm.models.naming import our_name
from flambeau.llm.models.presets import from_meta, preset
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.applying import build as build_network

Build = Callable[[Architecture], Transformer]
Arrived = Callable[[str, nn.Module], nn.Module | None]


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    build: Build = build_network,
    shard: Shard | None = None,
    arrived: Arrived | None = None,
) -> Transformer:
    """The network of a folder or file, ready to run; without a type, in that of its embeddings in the file."""
    path = Path(path)
    files = open_weights(path)
    arch = read_architecture(path, files)
    with blank(dtype or embedding(files).dtype):
        model = build(arch).eval().requires_grad_(False)
    placements = fit(model, arch, files, shard)
    fill(model, placements, torch.device(device), progress or terminal_bar(path.name), arrived)
    model.rotation.make_tables(torch.device(device))
    return model


def read_architecture(path: Path, files: list[WeightFile] | None = None) -> Architecture:
    """What config.json, params.json or the folder's name says about a checkpoint, in this order."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; name the folder of a checkpoint or one of its files")
    folder = path.parent if path.is_file() else path
    if (folder / "config.json").is_file():
        return read_hugging_face(folder)
    if (folder / "params.json").is_file():
        files = open_weights(path) if files is None else files
        return from_meta(read_json(folder / "params.json"), vocab_size=embedding(files).shape[0])
    return preset(folder.resolve().name)


def fill(
    model: Transformer,
    placements: list[Placement],
    device: torch.device,
    progress: Progress | None,
    arrived: Arrived | None,
) -> None:
    """Hand every tensor to its parameter."""
    total_bytes, done_bytes = sum(placement.num_bytes for placement in placements), 0
    awaited = Counter(placement.owner for placement in placements)
    for placement in placements:
        place(model.get_submodule(placement.owner), placement, device)
        awaited[placement.owner] -= 1
        if arrived is not None and not awaited[placement.owner]:
            exchange(model, placement.owner, arrived)
        done_bytes += placement.num_bytes
        if progress is not None:
            progress(done_bytes, total_bytes)


def place(module: nn.Module, placement: Placement, device: torch.device) -> None:
    """Fill a parameter or a part of it; its first part finds it without memory."""
    leaf = placement.parameter.rpartition(".")[2]
    target: Tensor = getattr(module, leaf)
    tensor = placement.cut(placement.stored.read())
    if not placement.region:
        value = tensor.to(device, target.dtype).contiguous()
    else:
        is_blank = target.is_meta
        value = torch.empty(target.shape, dtype=target.dtype, device=device) if is_blank else target.detach()
        value[placement.region].copy_(tensor)
    setattr(module, leaf, nn.Parameter(value, requires_grad=False) if isinstance(target, nn.Parameter) else value)


def exchange(model: Transformer, name: str, arrived: Arrived) -> None:
    """Put another module in a finished one's place, where one is given."""
    other = arrived(name, model.get_submodule(name))
    if other is not None:
        model.set_submodule(name, other)


def embedding(files: list[WeightFile]) -> Stored:
    """The embeddings in a checkpoint, of which there is one in every network."""
    for file in files:
        for stored in file:
            if our_name(stored.name) == "model.embed_tokens.weight":
                return stored
    raise CheckpointError(
        f"{files[0].path} holds no model.embed_tokens.weight; is it the checkpoint of a language model?"
    )
