"""GptSettings: the `handler` section of a language model's model-config.yaml."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from flambeau.errors import HandlerError, suggest
from flambeau.llm.chat.chat_format import AUTO
from flambeau.llm.chat.formats import REASONING_NAMES, TOOL_FORMATS
from flambeau.llm.config import EngineConfig, ModelImpl
from flambeau.llm.errors import CheckpointError, InvalidRequest
from flambeau.llm.executor.backend import PLAIN_PYTORCH
from flambeau.llm.json_files import read_object
from flambeau.llm.sampling_params import SAMPLING_FIELDS, SamplingParams, is_int

logger = logging.getLogger(__name__)

CHOICES = {
    "tool_parser": (AUTO, *TOOL_FORMATS),
    "reasoning_parser": (AUTO, *REASONING_NAMES),
    "model_impl": get_args(ModelImpl),
}
TEXTS = (
    "model_path",
    "tokenizer_path",
    "draft_model_path",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "kv_disk_folder",
    "download_dir",
)
SWITCHES = (
    "compile",
    "prefix_cache",
    "stream",
    "resume",
    "fx_graph_cache",
    "generation_config",
    "merge_lora",
    "trust_remote_code",
    "read_images",
    "read_sounds",
)
COUNTS = (
    "speculate_k",
    "max_num_seqs",
    "max_model_len",
    "max_step_tokens",
    "block_size",
    "num_blocks",
    "kv_cache_bytes",
    "image_cache_bytes",
    "kv_host_memory_mb",
    "kv_disk_mb",
    "tensor_parallel_size",
)
SAMPLING = {known.config_key: known for known in SAMPLING_FIELDS.values() if known.config_key}
OLDER = {"converted_ckpt_dir": "model_path", "draft_checkpoint_path": "draft_model_path"}  # names in older archives
WITHOUT_EFFECT = ("profile", "fx_graph_cache")  # a profiler; a cache of compiled code, which is always kept
OTHERS = ("speculative", "kv_cache_fraction", "lora_adapters")  # each has values of its own kind
KNOWN = (*TEXTS, *CHOICES, *SWITCHES, *COUNTS, *SAMPLING, *OTHERS, *OLDER, *WITHOUT_EFFECT)
MTP = "mtp"  # speculation by the checkpoint's own layer of multi-token prediction
DEFAULT_NEW_TOKENS = 256
GENERATION_CONFIG = "generation_config.json"
# Keys of that file that change texts in transformers and have no effect here, with the values that change nothing.
UNHEEDED: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0, 0.0),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1, 1.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "top_h": (),
    "guidance_scale": (1, 1.0),
    "min_new_tokens": (0,),
    "min_length": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "watermarking_config": (),
    "constraints": ([],),
    "force_words_ids": ([],),
    "dola_layers": (),
    "token_healing": (False,),
}
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class GptSettings:
    """The checkpoint, the engine's configuration and the defaults of requests."""

    model_path: Path
    engine: EngineConfig
    sampling: SamplingParams  # the defaults of requests
    limits_length: bool = False  # the model's settings have max_new_tokens
    stream: bool = False  # the default of requests
    resume: bool = False  # another worker continues a stream after its worker died
    tensor_parallel_size: int | None = None
    tool_parser: str = AUTO  # a name of TOOL_FORMATS
    reasoning_parser: str = AUTO  # a name of REASONING_FORMATS, or "none"


def read_settings(config: Mapping[str, Any], folder: Path, *, device: str, allows_others: bool = False) -> GptSettings:
    """Read the settings of the model in `folder`; `allows_others` accepts keys of a subclass."""
    section = section_of(config, allows_others=allows_others)
    checked = {key: check(key, value) for key, value in section.items() if key in KNOWN and value is not None}
    for key in WITHOUT_EFFECT:
        if key in checked:
            logger.info("%s has no effect here", key)
    model_path = find_model(checked, folder)
    return GptSettings(
        model_path=model_path,
        engine=engine_config(checked, folder, device),
        sampling=sampling_defaults({**generation_defaults(model_path, checked), **checked}),
        limits_length="max_new_tokens" in checked,
        stream=checked.get("stream", False),
        resume=bool(checked.get("resume", config.get("resume", False))),
        tensor_parallel_size=checked.get("tensor_parallel_size"),
        tool_parser=checked.get("tool_parser", AUTO),
        reasoning_parser=checked.get("reasoning_parser", AUTO),
    )


def section_of(config: Mapping[str, Any], *, allows_others: bool) -> dict[str, Any]:
    """The `handler` section merged over the same keys at the top level, with older names replaced."""
    section = config.get("handler") or {}
    if isinstance(section, str):  # the name of the handler
        section = {}
    if not isinstance(section, Mapping):
        raise HandlerError(f"the handler section of the model's YAML must hold keys and values, not {section!r}")
    if "openai" in section:  # a subclass would ignore it silently
        raise HandlerError("openai belongs beside the handler section of the model's YAML, not into it")
    for key in section:
        if key not in KNOWN and key != "name":
            refuse(str(key), is_error=not allows_others)
    found = {key: config[key] for key in KNOWN if key in config} | {k: v for k, v in section.items() if k in KNOWN}
    for old, new in OLDER.items():
        if old in found:
            found.setdefault(new, found.pop(old))
            if new == "draft_model_path":
                found.setdefault("speculative", True)  # older archives have no such switch
    return found


def refuse(key: str, *, is_error: bool) -> None:
    """Reject an unknown key, or warn about it, and suggest a known one."""
    near = suggest(key, KNOWN)
    hint = f"did you mean {near}?" if near else f"it may have {', '.join(KNOWN)}"
    text = f"the handler section of the model's YAML has {key}, which gpt_handler does not know; {hint}"
    if is_error:
        raise HandlerError(text)
    if near:
        logger.warning("%s", text)


def check(key: str, value: Any) -> Any:
    """Reject a value of the wrong type."""
    if key in SAMPLING:
        expected = SAMPLING[key].violation(value)
    elif key in TEXTS:
        expected = None if isinstance(value, str) else "text"
    elif key in CHOICES:
        expected = None if value in CHOICES[key] else f"one of {', '.join(CHOICES[key])}"
    elif key in SWITCHES:
        expected = None if isinstance(value, bool) else "true or false"
    elif key in COUNTS:
        expected = None if is_int(value) and value >= 1 else "a whole number from 1"
    elif key == "speculative":
        expected = None if isinstance(value, bool) or value == MTP else f"true, false or {MTP}"
    elif key == "kv_cache_fraction":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        expected = None if is_number and 0 <= value <= 1 else "a number from 0 to 1"
    elif key == "lora_adapters":
        is_valid = isinstance(value, Mapping) and all(is_adapter(name, path) for name, path in value.items())
        expected = None if is_valid else "names of adapters and their folders, like {sql: ./adapters/sql}"
    else:
        return value
    if expected is not None:
        raise HandlerError(f"handler: {key} must be {expected}, not {value!r}")
    return value


def is_adapter(name: Any, path: Any) -> bool:
    """Whether requests can name an adapter so: `#` separates the parts of names in a worker."""
    is_name = isinstance(name, str) and bool(name.strip()) and "#" not in name
    return is_name and isinstance(path, str) and bool(path)


def generation_defaults(model_path: Path, section: Mapping[str, Any]) -> dict[str, Any]:
    """The model's own sampling settings in its generation_config.json; the handler section takes precedence.

    `generation_config: false` leaves them out.
    """
    file = model_path / GENERATION_CONFIG
    if not section.get("generation_config", True) or not file.is_file():
        return {}
    given = read_object(file, CheckpointError)
    if unheeded := [
        f"{key} {given[key]!r}" for key, values in UNHEEDED.items() if given.get(key) not in (None, *values)
    ]:
        logger.warning(
            "%s has settings without effect here: %s; name what you need in requests, for example temperature: 0 for "
            "do_sample: false",
            file,
            ", ".join(unheeded),
        )
    found = {}
    for key, known in SAMPLING.items():
        value = given.get(key)
        if key == "max_new_tokens" or key in section or value is None or value == known.default:
            continue
        if expected := known.violation(value):
            raise HandlerError(
                f"{file}: {key} must be {expected}, not {value!r}; mend it, or set generation_config: false"
            )
        found[key] = value
    if found:
        words = ", ".join(f"{key} {value}" for key, value in found.items())
        logger.info("%s sets the defaults of requests: %s", GENERATION_CONFIG, words)
    return found


def sampling_defaults(section: Mapping[str, Any]) -> SamplingParams:
    given = {known.name: section[key] for key, known in SAMPLING.items() if key in section}
    try:
        return SamplingParams(**{"max_tokens": DEFAULT_NEW_TOKENS, **given})
    except InvalidRequest as error:
        raise HandlerError(f"handler: {error}") from None


def engine_config(section: Mapping[str, Any], folder: Path, device: str) -> EngineConfig:
    same = ("dtype", "max_num_seqs", "max_model_len", "max_step_tokens", "block_size", "num_blocks", "kv_cache_bytes")
    more = (
        "kv_cache_fraction",
        "prefix_cache",
        "kv_host_memory_mb",
        "kv_disk_mb",
        "compile",
        "quantization",
        "kv_cache_dtype",
        "speculate_k",
        "merge_lora",
        "read_images",
        "read_sounds",
        "image_cache_bytes",
        "model_impl",
        "trust_remote_code",
    )
    fields = {key: section[key] for key in (*same, *more) if key in section}
    for key in ("dtype", "kv_cache_dtype"):
        if fields.get(key) == "auto":
            del fields[key]
    if "tokenizer_path" in section:
        fields["tokenizer"] = str(find(section["tokenizer_path"], folder, "tokenizer_path"))
    if "kv_disk_folder" in section:
        fields["kv_disk_folder"] = str(start_folder() / Path(section["kv_disk_folder"]).expanduser())
    if adapters := section.get("lora_adapters"):
        fields["lora_adapters"] = {
            name: str(find(path, folder, f"lora_adapters: {name}")) for name, path in adapters.items()
        }
    if section.get("speculative") == MTP and section.get("draft_model_path"):
        raise HandlerError(
            f"handler: speculative: {MTP} uses the model's own layer, and there is a draft_model_path too; leave it "
            "out, or set speculative: true"
        )
    if section.get("speculative") == MTP:
        fields["speculation"] = MTP
    elif section.get("speculative", False):
        draft = section.get("draft_model_path")
        fields["draft"] = str(folder_of(find(draft, folder, "draft_model_path"))) if draft else ""
        fields["speculation"] = "draft" if draft else "lookup"
    return EngineConfig(device=device, **fields)


def find_model(section: Mapping[str, Any], folder: Path) -> Path:
    """The folder of the checkpoint: `model_path`, or the model's own folder."""
    name = section.get("model_path")
    if name is None:
        return folder
    found = places_of(name, folder)
    if not any(place.exists() for place in found) and is_hub_name(name):
        return fetch(name, section.get("download_dir"), found)
    return folder_of(find(name, folder, "model_path"))


def find(name: str, folder: Path, key: str) -> Path:
    """Resolve a path from the model's folder, else from the folder that the server was started in."""
    places = places_of(name, folder)
    for place in places:
        if place.exists():
            return place
    raise HandlerError(f"handler: {key} is {name!r}, and there is {missing(places)}")


def shortened(length: int, wanted: int | None, trained: int) -> str | None:
    """A warning if sequences are limited to fewer tokens than requested, or than the model was trained for."""
    if wanted is not None and wanted > trained:
        return f"max_model_len is {wanted}, but the model knows no more than {trained} tokens; it gets {length}"
    if length < (wanted or trained):
        return f"the KV cache holds {length} tokens, and no sequence may be longer; raise kv_cache_bytes or num_blocks"
    return None


def compile_words(config: EngineConfig, device: str, decode: str = "") -> str:
    """What `compile` does on this type of device, for the log; `decode` is what computes decode steps already.

    Empty if the line before says all: CPU kernels do, or Inductor will, or transformers does.
    """
    if not config.compile:
        return "compile: false: every step runs as plain PyTorch"
    if config.tensor_parallel_size > 1 and device == "cpu":
        return "compile: true: C++ kernels compute the layers of a rank one by one, if they were compiled before"
    if config.tensor_parallel_size > 1:
        return "compile: true has no effect with several ranks: while one compiles, the others would wait"
    how = {
        "cpu": "C++ kernels for the whole step",
        "cuda": "Triton kernels or torch.compile (Inductor), captured as CUDA graphs",
    }.get(device, "torch.compile (Inductor)")
    draft = " of the model and its draft" if config.draft else ""
    if decode not in ("", PLAIN_PYTORCH):
        return ""
    return f"compile: true: decode steps{draft} are compiled in the background: {how}. Plain PyTorch answers meanwhile"


def missing(places: list[Path]) -> str:
    return f"neither {' nor '.join(map(str, places))}" if len(places) > 1 else "no such file or folder"


def places_of(name: str, folder: Path) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_absolute():
        return [path]
    return [*dict.fromkeys((folder / path, start_folder() / path))]


def start_folder() -> Path:
    """The folder that the server was started in."""
    return Path(os.environ.get("FLAMBEAU_START_FOLDER") or Path.cwd())


def folder_of(path: Path) -> Path:
    """A checkpoint is a folder, or a GGUF file; older settings name the file in a folder."""
    return path.parent if path.is_file() and path.suffix != ".gguf" else path


def is_hub_name(name: str) -> bool:
    """Whether a name has the form of a Hugging Face model: owner/model."""
    parts = name.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)


def fetch(name: str, download_dir: str | None, places: list[Path]) -> Path:
    """Download a checkpoint from the hub, but only if `download_dir` is set."""
    if download_dir is None:
        raise HandlerError(
            f"handler: model_path is {name!r}, and there is {missing(places)}. A model of the "
            f"Hugging Face hub is downloaded first: `hf download {name} --local-dir FOLDER`, with model_path: FOLDER; "
            "or set download_dir, and it is downloaded when the model is loaded"
        )
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise HandlerError(f"to download {name}, install huggingface_hub where the workers run") from None
    try:
        return Path(hub.snapshot_download(name, cache_dir=download_dir, allow_patterns=[*HUB_FILES]))
    except Exception as error:
        text = f"{name} could not be downloaded to {download_dir}: {error}"
        raise HandlerError(text, is_final=False) from error  # the network may recover
