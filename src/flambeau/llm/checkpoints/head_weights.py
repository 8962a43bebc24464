"""Heads that propose tokens: EAGLE checkpoints, and layers of multi-token prediction in the checkpoint of a model.

EAGLE heads are published with the configuration of a Llama of one layer; what they are shows in their tensors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flambeau.llm.checkpoints.checkpoint import Arrived, fill, open_files, progress_of
from flambeau.llm.checkpoints.parameter_map import map_weights
from flambeau.llm.checkpoints.quantization_methods import as_unpacked, has_packed_layers, is_packed, unpack_weights
from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.gguf_header import gguf_path
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.draft_heads import DraftHead, HeadSettings, make_head
from flambeau.llm.models.hugging_face import from_hugging_face, read_config
from flambeau.llm.models.meta_device import on_meta_device
from flambeau.llm.models.tensor_names import Renames
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.quantizer import empty_layer, replace_layers
from flambeau.llm.quantize.settings import read_quantization

logger = logging.getLogger(__name__)

EAGLE_NAMES: Renames = (
    (r"^model\.", ""),
    (r"^midlayer\.", "layers.0."),
)
TOKEN_MAPS = ("d2t", "t2d")  # which tokens of the target the head's own are; the second follows from the first
HEAD_KEYS = frozenset(
    {
        "draft_vocab_size",
        "target_hidden_size",
        "target_model_type",
        "eagle_config",
        "eagle_aux_hidden_state_layer_ids",
        "aux_hidden_state_layer_ids",
        "norm_before_residual",
        "norm_before_fc",
        "norm_output",
        "transformer_layer_config",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "embed_requires_grad",
        "bias",
    }
)
UNSUPPORTED = ("fc_norm", "use_moe")  # parts that some heads have and this one has not
LAYER_IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")


class SelectedTensors:
    """A file of which only some tensors are read."""

    def __init__(self, file: WeightFile, keeps: Callable[[str], bool]) -> None:
        self.path = file.path
        self._file, self._keeps = file, keeps

    def __iter__(self) -> Iterator[StoredTensor]:
        return (stored for stored in self._file if self._keeps(stored.name))

    def read(self, name: str) -> torch.Tensor:
        """The tensor of this name."""
        return self._file.read(name)


# ---- EAGLE ----


def is_eagle(path: Path) -> bool:
    """Whether a folder holds an EAGLE head instead of a model."""
    folder = path.parent if path.is_file() else path
    if gguf_path(path) is not None or not (folder / "config.json").is_file():
        return False
    config = read_config(folder)
    names = " ".join(map(str, config.get("architectures") or ())) + str(config.get("speculators_model_type") or "")
    return "eagle" in names.lower() or "draft_vocab_size" in config or "fc.weight" in eagle_tensors(path)


def eagle_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a head by their names, without the prefixes that some files have."""
    return {eagle_name(stored.name): stored for file in open_files(path) for stored in file}


def eagle_name(name: str) -> str:
    for pattern, replacement in EAGLE_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def read_eagle(path: Path, target: Architecture) -> HeadSettings:
    """The shape of an EAGLE head; raises LLMError if it is the head of another model."""
    config, tensors = read_config(path.parent if path.is_file() else path), eagle_tensors(path)
    for key in UNSUPPORTED:
        if config.get(key):
            raise CheckpointError(f"{key} of the EAGLE head {path} is not supported; use a head without it")
    if "fc.weight" not in tensors:
        raise CheckpointError(f"{path} has the configuration of an EAGLE head, but no tensor fc.weight")
    arch = eagle_architecture(config, target)
    is_third = "layers.0.hidden_norm.weight" in tensors
    head = tensors.get("lm_head.weight") if is_third else None
    settings = HeadSettings(
        kind="eagle3" if is_third else "eagle",
        arch=arch,
        layers=eagle_layers(config, target.num_layers) if is_third else (target.num_layers,),
        state_size=target.hidden_size,
        draft_vocab_size=0 if head is None else head.shape[0],
        has_embeddings="embed_tokens.weight" in tensors,
        has_bias="fc.bias" in tensors,
        norm_before_residual=bool(config.get("norm_before_residual", "transformer_layer_config" in config)),
        norm_before_projection=bool(config.get("norm_before_fc")),
        norms_output=bool(config.get("norm_output")),
    )
    check_fit(path, settings, target, tensors)
    if unknown := [key for key in arch.unknown_keys if key not in HEAD_KEYS]:
        logger.warning("config.json of the head %s has keys that have no effect: %s", path, ", ".join(unknown))
    return settings


def eagle_architecture(config: Mapping[str, Any], target: Architecture) -> Architecture:
    """That of its layers, for sequences as long as the target's: rotary positions have no end."""
    layer = {**config, **(config.get("transformer_layer_config") or {})}
    given = {key: value for key, value in layer.items() if key not in HEAD_KEYS and value is not None}
    given |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    given.setdefault("vocab_size", target.vocab_size)
    arch = from_hugging_face(given)
    return replace(arch, max_length=max(arch.max_length, target.max_length), renames=EAGLE_NAMES)


def eagle_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers of the target whose inputs the head was trained on.

    At the top of config.json they are named by their inputs, in `eagle_config` by the outputs of the layers before.
    """
    named = next((config[key] for key in LAYER_IDS if config.get(key)), None)
    if named is None and (nested := (config.get("eagle_config") or {}).get(LAYER_IDS[0])):
        named = [int(number) + 1 for number in nested]
    found = tuple(map(int, named)) if named else (2, num_layers // 2, num_layers - 3)
    if min(found) < 0 or max(found) > num_layers:
        raise LLMError(
            f"the EAGLE head reads the layers {', '.join(map(str, found))}, and the model has {num_layers}; use the "
            "head that was trained for this model"
        )
    return found


def check_fit(path: Path, settings: HeadSettings, target: Architecture, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise for the head of a model with another vocabulary or another hidden size."""
    arch, remedy = settings.arch, "use the head that was trained for this model"
    if arch.vocab_size != target.vocab_size:
        raise LLMError(f"the head {path} has {arch.vocab_size} tokens and the model {target.vocab_size}; {remedy}")
    num_states = len(settings.layers) if settings.kind == "eagle3" else 2
    expected, found = num_states * target.hidden_size, tensors["fc.weight"].shape[1]
    if found != expected:
        raise LLMError(
            f"the head {path} reads {found} numbers of a token, and {num_states} hidden states of the model have "
            f"{expected}; {remedy}"
        )
    shares = settings.kind == "eagle" or not settings.has_embeddings
    if shares and arch.hidden_size != target.hidden_size:
        raise LLMError(
            f"the head {path} has hidden states of {arch.hidden_size} numbers and the model of {target.hidden_size}, "
            f"whose embeddings it needs; {remedy}"
        )
    size = settings.draft_vocab_size
    if size not in (0, target.vocab_size) and "d2t" not in tensors:
        raise CheckpointError(f"the head {path} has {size} tokens of its own, but no tensor d2t that says which")


def target_ids(path: Path, settings: HeadSettings) -> torch.Tensor | None:
    """Which tokens of the target those of the head are; None: the same."""
    stored = eagle_tensors(path).get("d2t") if settings.draft_vocab_size else None
    if stored is None:
        return None
    shifts = stored.read().to(torch.int64)
    found = torch.arange(settings.draft_vocab_size) + shifts if len(shifts) == settings.draft_vocab_size else shifts
    is_valid = len(shifts) == settings.draft_vocab_size and int(found.min()) >= 0
    if not is_valid or int(found.max()) >= settings.arch.vocab_size or len({*found.tolist()}) < len(found):
        raise CheckpointError(f"d2t of the head {path} does not name {settings.draft_vocab_size} tokens of the model")
    return found


# ---- layers of multi-token prediction ----


@dataclass(frozen=True, slots=True)
class MtpNaming:
    """Where the tensors of a layer of multi-token prediction are."""

    prefix: str  # a pattern
    renames: Renames  # of what follows the prefix
    hidden_first: bool = False


def namings(num_layers: int) -> tuple[MtpNaming, ...]:
    """DeepSeek's (GLM-4.5 has the same), and MiMo's."""
    return (
        MtpNaming(rf"^model\.layers\.{num_layers}\.", (("shared_head.norm", "norm"),)),
        MtpNaming(
            r"^model\.mtp_layers\.0\.",
            (
                ("token_layernorm", "enorm"),
                ("hidden_layernorm", "hnorm"),
                ("input_proj", "eh_proj"),
                ("final_layernorm", "norm"),
            ),
            hidden_first=True,
        ),
    )


SHARED = re.compile(r"\.(embed_tokens|shared_head\.head)\.weight$")  # copies of the target's own


def find_mtp(files: list[WeightFile], arch: Architecture) -> MtpNaming | None:
    """How a layer that predicts further tokens is named in these files; None: there is none."""
    names = [stored.name for file in files for stored in file]
    for naming in namings(arch.num_layers):
        ends = {re.sub(naming.prefix, "", name) for name in names if re.search(naming.prefix, name)}
        projection = next((old for old, new in naming.renames if new == "eh_proj"), "eh_proj")
        if any(end.startswith(f"{projection}.") for end in ends):
            return naming
    return None


def read_mtp(path: Path, arch: Architecture) -> tuple[HeadSettings, MtpNaming]:
    """The shape of the layer that predicts further tokens; raises LLMError if there is none."""
    naming = None if gguf_path(path) is not None else find_mtp(open_files(path), arch)
    if naming is None:
        raise LLMError(
            f"speculative: mtp needs a layer of multi-token prediction, and {path} has none that is known (DeepSeek "
            "V3's, GLM-4.5's or MiMo's); use a draft model, an EAGLE head, or speculative: true for n-grams"
        )
    start = (
        *((rf"{naming.prefix}{re.escape(old)}\.", f"{new}.") for old, new in naming.renames),
        (rf"{naming.prefix}(enorm|hnorm|eh_proj)\.", r"\1."),
        (naming.prefix, "model.layers.0."),
    )
    layer = replace(
        arch,
        num_layers=1,
        dense_layers=frozenset(),
        windows=(),
        chunks=(),
        unrotated_layers=frozenset(),
        num_unused_layers=0,
        unused="",
        renames=(*start, *arch.renames),
    )
    settings = HeadSettings(
        kind="mtp",
        arch=layer,
        layers=(arch.num_layers,),
        state_size=arch.hidden_size,
        hidden_first=naming.hidden_first,
    )
    return settings, naming


# ---- loading ----


def load_eagle(
    path: Path, settings: HeadSettings, target: Transformer, *, device: torch.device, dtype: torch.dtype
) -> DraftHead:
    """An EAGLE head, which shares what it does not have with its target."""
    files: list[WeightFile] = [
        SelectedTensors(file, lambda name: eagle_name(name) not in TOKEN_MAPS) for file in open_files(path)
    ]
    head = load_files(path, files, settings, device=device, dtype=dtype)
    ids = target_ids(path, settings)
    head.target_ids_D = None if ids is None else ids.to(device)
    head.share(target)
    return head


def load_mtp(
    path: Path,
    settings: HeadSettings,
    naming: MtpNaming,
    target: Transformer,
    *,
    device: torch.device,
    dtype: torch.dtype,
    arrived: Arrived | None = None,
    keeps_blocks: bool = False,
) -> DraftHead:
    """A layer of multi-token prediction; embeddings and the last layer are the target's, as they are in training."""

    def keeps(name: str) -> bool:
        return bool(re.search(naming.prefix, name)) and not SHARED.search(name)

    files: list[WeightFile] = [SelectedTensors(file, keeps) for file in open_files(path)]
    head = load_files(path, files, settings, device=device, dtype=dtype, arrived=arrived, keeps_blocks=keeps_blocks)
    head.share(target)
    return head


def load_files(
    path: Path,
    files: list[WeightFile],
    settings: HeadSettings,
    *,
    device: torch.device,
    dtype: torch.dtype,
    arrived: Arrived | None = None,
    keeps_blocks: bool = False,
) -> DraftHead:
    arch = settings.arch
    if is_packed(arch):
        if has_packed_layers(files, arch):
            unpacked = unpack_weights(files, arch, keeps_blocks=keeps_blocks)
            files, arch = unpacked.files, as_unpacked(arch, unpacked.settings)
        else:
            arch = as_unpacked(arch, None)
        settings = replace(settings, arch=arch)
    with on_meta_device(dtype):
        head = make_head(settings).eval().requires_grad_(False)
        if (written := read_quantization(arch.source)) is not None:
            replace_layers(head, written, empty_layer)
    fill(head, map_weights(head, arch, files, None), device, progress_of(f"the head of {path.name}"), arrived)
    head.rotation.make_tables(device)
    return head
