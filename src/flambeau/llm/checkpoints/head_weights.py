"""Heads that propose tokens: EAGLE checkpoints, and layers of multi-token prediction in the checkpoint of a model.

EAGLE heads are published with the configuration of a Llama of one layer; what they are shows in their tensors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flambeau.llm.checkpoints.checkpoint import Arrived, fill, open_files, progress_of
from flambeau.llm.checkpoints.gguf_weights import open_gguf
from flambeau.llm.checkpoints.parameter_map import map_weights
from flambeau.llm.checkpoints.quantization_methods import as_unpacked, has_packed_layers, is_packed, unpack_weights
from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.gguf_header import gguf_path
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.draft_heads import DraftHead, HeadSettings
from flambeau.llm.models.families.renames import Renames
from flambeau.llm.models.head_kinds import make_head
from flambeau.llm.models.hugging_face import from_hugging_face, read_config
from flambeau.llm.models.meta_device import on_meta_device
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
        "fc_norm",
        "reuse_target_lm_head",
        "additional_fc",
        "num_aux_hidden_states",
        "norm_output",
        "transformer_layer_config",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "embed_requires_grad",
        "bias",
    }
)
UNSUPPORTED = ("use_moe", "parallel_drafting")  # parts that some heads have and this one has not
UNKNOWN_KINDS = {  # by what their architectures are called; their tensors may look like those of others
    "peagle": "P-EAGLE, which proposes all tokens at once",
    "dspark": "DSpark",
    "domino": "Domino",
    "dflash": "DFlash in another form than z-lab's",
    "medusa": "Medusa",
    "mlpspeculator": "an MLP speculator",
}
UNKNOWN_PARTS = {".experts.": "experts", ".kv_a_proj_with_mqa.": "latent attention"}  # by the names of tensors
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
    """Whether a folder holds an EAGLE head instead of a model; raises LLMError for heads of other kinds."""
    folder = path.parent if path.is_file() else path
    if gguf_path(path) is not None or not (folder / "config.json").is_file():
        return False
    config = read_config(folder)
    given = (*(config.get("architectures") or ()), config.get("speculators_model_type"), config.get("model_type"))
    names = " ".join(str(name) for name in given if name)
    plain = names.lower().replace("_", "") + (" medusa" if "medusa_num_heads" in config else "")
    if kind := next((words for name, words in UNKNOWN_KINDS.items() if name in plain), None):
        raise LLMError(
            f"the head {path} is {kind}, which is not supported; use an EAGLE head, a draft model, or n-grams of the "
            "text (speculative: true, or --speculative lookup)"
        )
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
    for name, part in UNKNOWN_PARTS.items():
        if any(name in each for each in tensors):
            raise CheckpointError(f"the EAGLE head {path} has {part}, which is not supported; use a head without")
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
        norms_each="fc_norm.0.weight" in tensors,
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
    if not settings.has_embeddings and target.embedding_size not in (0, arch.hidden_size):
        raise LLMError(
            f"the head {path} needs embeddings of {arch.hidden_size} numbers, and the model's have "
            f"{target.embedding_size}; use a draft model"
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


SHARED = re.compile(r"\.(embed_tokens|word_embeddings|shared_head\.head)\.weight$")  # copies of the target's own
ROUTED = re.compile(r"\.mlp\.(gate|experts)\.")
DECLARED = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")  # in config.json


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
        return bool(re.search(naming.selects, name)) and not SHARED.search(name)

    files: list[WeightFile] = [SelectedTensors(file, keeps) for file in mtp_files(path)]
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
        if gguf_path(path) is None and has_packed_layers(files, arch):  # GGUF files are read dequantized
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
