"""Layers of multi-token prediction in the checkpoint of a model, which propose tokens from its hidden states."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

from flambeau.llm.checkpoints.checkpoint import open_files
from flambeau.llm.checkpoints.gguf_weights import open_gguf
from flambeau.llm.checkpoints.head_weights import SelectedTensors, load_files
from flambeau.llm.checkpoints.layer_formats import NO_FORMS, KeptForms
from flambeau.llm.checkpoints.parameter_filler import Arrived
from flambeau.llm.checkpoints.weight_files import WeightFile
from flambeau.llm.errors import LLMError
from flambeau.llm.gguf_header import gguf_path
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.draft_heads import DraftHead, HeadSettings
from flambeau.llm.models.families.renames import Renames
from flambeau.llm.models.transformer import Transformer

SHARED = re.compile(r"\.(embed_tokens|word_embeddings|shared_head\.head)\.weight$")  # copies of the target's own
ROUTED = re.compile(r"\.mlp\.(gate|experts)\.")
DECLARED = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")  # in config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpNaming:
    """Where the tensors of a layer of multi-token prediction are."""

    selects: str  # a pattern of the names of its tensors
    projection: str  # the tensor that reads embeddings and hidden states
    renames: Renames  # to the names in an MtpHead, and those of a layer of its family
    hidden_first: bool = False
    shares_norm: bool = False
    num_depths: int = 1
    num_layers: int = 1  # of each depth, one after another
    family_first: bool = False  # the family's own names are replaced before


def deepseek_naming(num_layers: int, num_depths: int) -> MtpNaming:
    """That of DeepSeek, GLM and Ling, whose layers follow those of the network."""
    layers = [rf"^model\.layers\.{num_layers + depth}\." for depth in range(num_depths)]
    renames: list[tuple[str, str]] = []
    for depth, layer in enumerate(layers):
        own = f"further.{depth - 1}." if depth else ""
        renames += [
            (rf"{layer}(?:shared_head\.norm|final_layernorm)\.", f"{own or 'model.'}norm."),
            (rf"{layer}(enorm|hnorm|eh_proj)\.", rf"{own}\1."),
            (layer, f"model.layers.{depth}."),
        ]
    return MtpNaming(
        selects="|".join(layers),
        projection=f"model.layers.{num_layers}.eh_proj.",
        renames=tuple(renames),
        num_depths=num_depths,
        family_first=True,  # recurrent layers have names that depend on their numbers
    )


def nemotron_naming(names: list[str]) -> MtpNaming:
    """That of Nemotron 3, of which each layer is attention or feed-forward only."""
    layer = r"^mtp\.layers\."
    return MtpNaming(
        selects=layer,
        projection="mtp.layers.0.eh_proj.",
        renames=(
            (rf"{layer}0\.(enorm|hnorm|eh_proj)\.", r"\1."),
            (rf"{layer}\d+\.final_layernorm\.", "model.norm."),
            (layer, "model.layers."),
        ),
        num_layers=1 + max(int(found[1]) for name in names if (found := re.match(rf"{layer}(\d+)\.", name))),
    )


def namings(num_layers: int) -> tuple[MtpNaming, ...]:
    """DeepSeek's, MiMo's, Ernie's, and that of Qwen and K-EXAONE."""
    mimo, qwen = r"^model\.mtp_layers\.0\.", r"^mtp\."
    return (
        deepseek_naming(num_layers, 1),
        MtpNaming(
            selects=mimo,
            projection="model.mtp_layers.0.input_proj.",
            renames=(
                (rf"{mimo}token_layernorm\.", "enorm."),
                (rf"{mimo}hidden_layernorm\.", "hnorm."),
                (rf"{mimo}input_proj\.", "eh_proj."),
                (rf"{mimo}final_layernorm\.", "model.norm."),
                (mimo, "model.layers.0."),
            ),
            hidden_first=True,
        ),
        MtpNaming(
            selects=r"^model\.mtp_\w+\.0\.",
            projection="model.mtp_linear_proj.0.",
            renames=(
                (r"^model\.mtp_emb_norm\.0\.", "enorm."),
                (r"^model\.mtp_hidden_norm\.0\.", "hnorm."),
                (r"^model\.mtp_linear_proj\.0\.", "eh_proj."),
                (r"^model\.mtp_block\.0\.", "model.layers.0."),
            ),
            shares_norm=True,  # as in Baidu's own FastDeploy
        ),
        MtpNaming(
            selects=rf"{qwen}(?!layers\.[1-9])",
            projection="mtp.fc.",
            renames=(
                (rf"{qwen}pre_fc_norm_embedding\.", "enorm."),
                (rf"{qwen}pre_fc_norm_hidden\.", "hnorm."),
                (rf"{qwen}fc\.", "eh_proj."),
                (rf"{qwen}norm\.", "model.norm."),
                (rf"{qwen}layers\.0\.", "model.layers.0."),
            ),
        ),
    )


def find_mtp(files: list[WeightFile], arch: Architecture) -> MtpNaming | None:
    """How a layer that predicts further tokens is named in these files; None: there is none that is known."""
    if arch.shapes:  # it has sizes of its own, which no file says
        return None
    names = [stored.name for file in files for stored in file]
    depths = {int(found[1]) for name in names if (found := re.match(r"model\.layers\.(\d+)\.eh_proj\.", name))}
    num_depths = next(depth for depth in count() if arch.num_layers + depth not in depths)
    if num_depths > 1:
        return deepseek_naming(arch.num_layers, num_depths)
    if not arch.has_mlp and any(name.startswith("mtp.layers.0.eh_proj.") for name in names):
        return nemotron_naming(names)
    for naming in namings(arch.num_layers):
        if any(name.startswith(naming.projection) for name in names):
            return naming
    return None


def mtp_files(path: Path) -> list[WeightFile]:
    """The files of a checkpoint with layers that predict further tokens."""
    return open_files(path) if gguf_path(path) is None else open_gguf(path, has_further=True)


def read_mtp(path: Path, arch: Architecture) -> tuple[HeadSettings, MtpNaming]:
    """The shape of the layer that predicts further tokens; raises LLMError if there is none that is known."""
    files = mtp_files(path)
    naming = find_mtp(files, arch)
    if naming is None:
        raise LLMError(
            f"speculative: mtp needs a layer of multi-token prediction, and {path} has none that is known (of DeepSeek "
            f"V3, GLM, Ling, MiMo, Ernie 4.5, Qwen, K-EXAONE or Nemotron 3){why_unknown(files, arch)}; use a draft "
            "model, an EAGLE head, or n-grams of the text (speculative: true, or --speculative lookup)"
        )
    own = [stored.name for file in files for stored in file if re.search(naming.selects, stored.name)]
    num_layers = naming.num_depths * naming.num_layers
    window, is_rotated = mtp_positions(arch)
    kinds = layer_kinds(path, naming, own)
    layer = replace(
        arch,
        num_layers=num_layers,
        dense_layers=kinds.dense,
        feed_forward_layers=kinds.feeding,
        recurrence=None,  # where the others are recurrent, it attends
        windows=(window,) * num_layers if window else (),
        chunks=(),
        unrotated_layers=frozenset() if is_rotated else frozenset(range(num_layers)),
        indexer=None if arch.indexer is None else replace(arch.indexer, reusing_layers=frozenset()),
        num_unused_layers=0,
        unused="",
        renames=(*arch.renames, *naming.renames) if naming.family_first else (*naming.renames, *arch.renames),
    )
    settings = HeadSettings(
        kind="mtp",
        arch=layer,
        layers=(arch.num_layers,),
        state_size=arch.hidden_size,
        hidden_first=naming.hidden_first,
        shares_norm=naming.shares_norm,
        num_depths=naming.num_depths,
    )
    return settings, naming


class LayerKinds(NamedTuple):
    """Which layers of a head have no experts, and which have no attention."""

    dense: frozenset[int]
    feeding: frozenset[int]


def layer_kinds(path: Path, naming: MtpNaming, names: list[str]) -> LayerKinds:
    """What the layers are, by their tensors: Ernie's has no experts, though the layers before it have."""
    if naming.num_layers == 1:
        is_sparse = any(map(ROUTED.search, names))
        return LayerKinds(frozenset(range(0 if is_sparse else naming.num_depths)), frozenset())
    own = [" ".join(name for name in names if name.startswith(f"mtp.layers.{i}.")) for i in range(naming.num_layers)]
    if any(".A_log" in each for each in own):
        raise LLMError(
            f"the layer of multi-token prediction of {path} has a recurrence, which is not supported; use a draft "
            "model, or n-grams of the text (speculative: true, or --speculative lookup)"
        )
    return LayerKinds(
        frozenset(i for i, each in enumerate(own) if ".mixer.experts." not in each),
        frozenset(i for i, each in enumerate(own) if ".mixer.q_proj." not in each),
    )


def mtp_positions(arch: Architecture) -> tuple[int | None, bool]:
    """The window of the layer, and whether it has positions, as the model's own layers of that kind."""
    kinds, sizes = arch.source.get("mtp_layer_types"), arch.source.get("mtp_sliding_windows")
    window: int | None = None
    if kinds and kinds[0] == "sliding_attention":
        window = int(sizes[0] if sizes else arch.source["sliding_window"])
    alike = [i for i in arch.attending_layers if (arch.window(i) is None) == (window is None)]
    return window, not alike or not arch.unrotated_layers.issuperset(alike)


def why_unknown(files: list[WeightFile], arch: Architecture) -> str:
    """What config.json and the files say of such layers."""
    if found := other_layers(files):
        return f", but others, such as {found}"
    if declared := next((key for key in DECLARED if arch.source.get(key)), None):
        return f": config.json has {declared}, but the weights of such layers are not among the files"
    return ""


def other_layers(files: list[WeightFile]) -> str | None:
    """The name of a tensor of such layers, whatever form they have."""
    names = (stored.name for file in files for stored in file)
    return next((name for name in names if "mtp" in name or ".eh_proj." in name), None)


def load_mtp(
    path: Path,
    settings: HeadSettings,
    naming: MtpNaming,
    target: Transformer,
    *,
    device: torch.device,
    dtype: torch.dtype,
    arrived: Arrived | None = None,
    forms: KeptForms = NO_FORMS,
) -> DraftHead:
    """A layer of multi-token prediction; embeddings and the last layer are the target's, as they are in training."""

    def keeps(name: str) -> bool:
        return bool(re.search(naming.selects, name)) and not SHARED.search(name)

    files: list[WeightFile] = [SelectedTensors(file, keeps) for file in mtp_files(path)]
    head = load_files(path, files, settings, device=device, dtype=dtype, arrived=arrived, forms=forms)
    head.share(target)
    return head
