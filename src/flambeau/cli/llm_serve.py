"""`flambeau llm serve`: serves a checkpoint with the gpt_handler."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from flambeau.archive.manifest import CONFIG
from flambeau.archive.pack import Recipe, pack
from flambeau.archive.packages import LLM, explain_missing, find_missing
from flambeau.archive.pretrained import other_use
from flambeau.cli.options import GGUF, check_checkpoint, checkpoint_folder
from flambeau.cli.serve import ModelOverrides, to_overrides
from flambeau.cli.serve import serve as serve_paths
from flambeau.config.resolution import Settings, to_server_config
from flambeau.config.server import ServerConfig
from flambeau.config.settings import LLM_SERVE
from flambeau.errors import ConfigError, WorkersFailed
from flambeau.serving.model_sources.hub import HubName, fetch, read_hub_name

HANDLER = "gpt_handler"
TOKENIZERS = {  # file → its reader
    "tokenizer.json": "tokenizers",
    "tokenizer.model": "sentencepiece",
    "tekken.json": "tokenizers",
    "tiktoken.model": "tokenizers",
}
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "*.tiktoken")  # beside one that is named
CHECKPOINT_LINKS = {"model_path": "checkpoint", "draft_model_path": "draft"}  # setting → name in the model's folder


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmServeFlags:
    """Engine options of the command line; None keeps the handler's default. The names are those of the handler."""

    model_path: Path
    draft_model_path: Path | None = None
    speculative: str | None = None
    tokenizer_path: Path | None = None
    dtype: str | None = None
    quantization: str | None = None
    lora_adapters: Mapping[str, str] | None = None
    speculate_k: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    compile: bool | None = None
    resume: bool | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    model_impl: str | None = None


def serve_settings(checkpoint: Path, settings: Settings) -> None:
    """Serve a checkpoint until a signal; one of the Hugging Face hub is downloaded first."""
    hub_name = read_hub_name(checkpoint)
    overrides = to_overrides(settings, must_load=True)
    flags = LlmServeFlags(
        model_path=fetch(hub_name) if hub_name else checkpoint,
        draft_model_path=fetch(draft) if (draft := hub_name_of(settings["draft"])) else settings["draft"],
        speculative=settings["speculative"],
        tokenizer_path=settings["tokenizer"],
        dtype=settings["dtype"],
        quantization=settings["quantization"],
        lora_adapters=read_adapters(settings["lora"] or ()),
        speculate_k=settings["speculate_k"],
        max_num_seqs=settings["max_num_seqs"],
        max_model_len=settings["max_model_len"],
        compile=settings["compile"],
        resume=settings["resume"],
        tool_parser=settings["tool_parser"],
        reasoning_parser=settings["reasoning_parser"],
        model_impl=settings["model_impl"],
    )
    serve(
        to_server_config(settings, LLM_SERVE),
        flags,
        replace(overrides, name=overrides.name or (hub_name.model_name if hub_name else None)),
        ranks=settings["tensor_parallel"],
        log_level=settings["log_level"],
        warnings=settings.warnings,
        state=settings["state"],
    )


def read_adapters(given: Sequence[str]) -> dict[str, str] | None:
    """Names and folders of adapters; raises ConfigError for an invalid one."""
    found: dict[str, str] = {}
    for text in given:
        name, separator, folder = text.partition("=")
        if not (name and separator and folder):
            raise ConfigError(f"--lora {text} must be NAME=FOLDER, such as --lora sql=./adapters/sql")
        if not Path(folder).expanduser().is_dir():
            raise ConfigError(f"--lora {text}: there is no folder {folder}; give one with an adapter as PEFT saves it")
        if name in found:
            raise ConfigError(f"--lora has two adapters with the name {name}; names must differ")
        found[name] = str(Path(folder).expanduser().resolve())
    return found or None


def hub_name_of(path: Path | None) -> HubName | None:
    return None if path is None else read_hub_name(path)


def serve(
    config: ServerConfig,
    flags: LlmServeFlags,
    overrides: ModelOverrides,
    *,
    ranks: int,
    log_level: str,
    warnings: Sequence[str] = (),
    state: Path | None = None,
) -> None:
    """Serve a checkpoint until a signal; exit with status 1 if it cannot be loaded."""
    check_checkpoint(flags.model_path)
    check_flags(flags)
    check_packages(flags)
    if (unread := checkpoint_folder(flags.model_path) / CONFIG).is_file():
        advice = f"llm serve takes flags only; for its settings use flambeau serve {unread.parent}"
        warnings = [*warnings, f"{unread} has no effect: {advice}"]
    if reason := other_use(checkpoint_folder(flags.model_path)):
        served = f"flambeau serve {checkpoint_folder(flags.model_path)} makes vectors or scores with it"
        warnings = [*warnings, f"llm serve only generates text with this model: {reason}; {served}"]
    name = overrides.name or checkpoint_folder(flags.model_path).resolve().name.removesuffix(GGUF)
    with tempfile.TemporaryDirectory(prefix="flambeau-llm-") as scratch:
        settings = to_model_config(flags, ranks)
        folder = write_model(Path(scratch), name, settings, has_links=bool(config.cluster.kind))
        try:
            serve_paths(config, [(folder, overrides)], overrides, log_level=log_level, warnings=warnings, state=state)
        except WorkersFailed:  # the log already has the reason
            sys.exit(1)


def check_flags(flags: LlmServeFlags) -> None:
    """Reject paths that do not exist before a worker starts with them."""
    if flags.draft_model_path is not None:
        if flags.speculative is not None:
            raise ConfigError(f"--speculative {flags.speculative} needs no draft; leave out --draft, or --speculative")
        check_checkpoint(flags.draft_model_path, "--draft")
    if flags.tokenizer_path is not None and not flags.tokenizer_path.exists():
        raise ConfigError(f"--tokenizer {flags.tokenizer_path} does not exist; give its folder or its file")


def check_packages(flags: LlmServeFlags) -> None:
    """Name the packages that the engine, and the tokenizer of this checkpoint, need and that are not installed."""
    tokenizer = flags.tokenizer_path or flags.model_path
    tokenizer = checkpoint_folder(tokenizer) if flags.tokenizer_path is None else tokenizer
    file = next((tokenizer / name for name in TOKENIZERS if (tokenizer / name).is_file()), tokenizer)
    modules = [*LLM.modules, *([TOKENIZERS[file.name]] if file.name in TOKENIZERS else [])]
    if missing := find_missing(modules, sys.path):
        raise ConfigError(explain_missing("the engine", missing, LLM.extra))


def to_model_config(flags: LlmServeFlags, ranks: int) -> dict[str, Any]:
    """The content of model-config.yaml for these flags."""
    given = {field.name: getattr(flags, field.name) for field in fields(flags)}
    handler = {
        key: str(value.resolve()) if isinstance(value, Path) else value
        for key, value in given.items()
        if value is not None
    }
    if flags.draft_model_path is not None or flags.speculative == "lookup":
        handler["speculative"] = True
    settings: dict[str, Any] = {"minWorkers": 1, "maxWorkers": 1, "startupTimeout": 1200}
    if ranks > 1:
        settings |= {"parallelType": "tp", "torchrun": {"nproc-per-node": ranks}}
    return {**settings, "handler": handler}


def write_model(folder: Path, name: str, settings: Mapping[str, Any], *, has_links: bool = False) -> Path:
    """Write a model folder that refers to the checkpoint, which is not copied.

    With `has_links` it is a part of the folder, by a link: the machines of a cluster get all files of a model.
    """
    links: dict[str, Path] = {}
    if has_links:
        settings, links = with_links(settings)
    config = folder / CONFIG
    config.write_text(yaml.safe_dump(dict(settings), sort_keys=False))
    pack(Recipe(model_name=name, handler=HANDLER, version="1.0", config_file=config), folder, format="no-archive")
    for link, target in links.items():
        (folder / name / link).parent.mkdir(exist_ok=True)
        (folder / name / link).symlink_to(target)
    return folder / name


def with_links(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """The settings with paths inside of the model's folder, and the links that these need."""
    handler = dict(settings["handler"])
    links: dict[str, Path] = {}
    for key, name in CHECKPOINT_LINKS.items():
        if key in handler:
            handler[key] = link_checkpoint(links, name, Path(handler[key]))
    if "tokenizer_path" in handler:
        handler["tokenizer_path"] = link_tokenizer(links, Path(handler["tokenizer_path"]))
    adapters = enumerate(handler.get("lora_adapters", {}).items(), 1)
    if named := {key: (f"adapter-{number}", Path(path)) for number, (key, path) in adapters}:
        links |= dict(named.values())
        handler["lora_adapters"] = {key: name for key, (name, _) in named.items()}
    return {**settings, "handler": handler}, links


def link_checkpoint(links: dict[str, Path], name: str, path: Path) -> str:
    """The path of a checkpoint behind a link: of its folder, or of a GGUF file."""
    if path.suffix == GGUF and path.is_file():
        links[f"{name}{GGUF}"] = path
        return f"{name}{GGUF}"
    links[name] = checkpoint_folder(path)
    return name if path.is_dir() else f"{name}/{path.name}"


def link_tokenizer(links: dict[str, Path], path: Path) -> str:
    """The path of a tokenizer behind links: of its folder, or of its file and those beside it."""
    if path.is_dir():
        links["tokenizer"] = path
        return "tokenizer"
    beside = (found for pattern in TOKENIZER_FILES for found in path.parent.glob(pattern) if found.is_file())
    links |= {f"tokenizer/{found.name}": found for found in (path, *beside)}
    return f"tokenizer/{path.name}"
