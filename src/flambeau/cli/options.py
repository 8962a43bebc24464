"""Options and defaults that several commands share, commands with settings, and the check of a checkpoint path."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from flambeau.errors import ConfigError

if TYPE_CHECKING:
    from flambeau.config.resolution import Settings
    from flambeau.config.settings import Setting

DEFAULT_INFERENCE, DEFAULT_MANAGEMENT = "http://127.0.0.1:8080", "http://127.0.0.1:8081"
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Inference = Annotated[str, typer.Option("--url", envvar="FLAMBEAU_URL", help="Address of the inference API.")]


def find_management(ctx: typer.Context, url: str) -> str:
    """The address of the management API, unless a flag or variable gives it: that of FLAMBEAU_URL, at the next port."""
    inference = os.environ.get("FLAMBEAU_URL")
    is_default = getattr(ctx.get_parameter_source("url"), "name", "") == "DEFAULT"
    return management_beside(inference) if inference and is_default else url


def management_beside(inference: str) -> str:
    """The next port, as 8081 is next to 8080; the same address if it has no port, as behind a proxy."""
    found = re.fullmatch(r"(https?://.+):(\d{1,5})/?", inference)
    return inference if found is None else f"{found[1]}:{int(found[2]) + 1}"


Management = Annotated[
    str,
    typer.Option(
        "--url",
        envvar="FLAMBEAU_MANAGEMENT_URL",
        callback=find_management,
        help="Address of the management API. With FLAMBEAU_URL, the next port of that address.",
    ),
]


def complete_model(ctx: typer.Context, incomplete: str) -> list[str]:
    """The models of the running server whose names begin so; none if it does not answer."""
    from flambeau.cli.api_client import model_names

    url = ctx.params.get("url")
    if ctx.command.name == "predict":  # its address is that of the inference API
        url = os.environ.get("FLAMBEAU_MANAGEMENT_URL") or management_beside(url or DEFAULT_INFERENCE)
    return [name for name in model_names(url or DEFAULT_MANAGEMENT) if name.startswith(incomplete)]


ModelName = Annotated[str, typer.Argument(help="Model name.", autocompletion=complete_model)]
Version = Annotated[str | None, typer.Option("--version", "-v", help="Model version; the default version if omitted.")]
EPILOG = (
    "Every option can also be set by a variable, such as FLAMBEAU_MAX_REQUEST_SIZE, or by a key of the --config file, "
    "such as max_request_size. `flambeau config show` prints what holds."
)


class SettingsCommand(TyperCommand):
    """A command with an option for each setting of a table, which `settings_of` reads.

    Tables are loaded and options are made only for the command that runs: `flambeau --help` needs none of them.
    """

    table_name = "SERVE"  # in flambeau.config.settings
    _made: Sequence[Any] | None = None

    @property
    def table(self) -> Sequence[Setting]:
        from flambeau.config import settings

        table: Sequence[Setting] = getattr(settings, self.table_name)
        return table

    def get_params(self, ctx: Any) -> Any:
        from flambeau.cli import setting_options

        if self._made is None:
            self._made = setting_options.make_params(self.table)
        return [*self._made, *super().get_params(ctx)]

    def invoke(self, ctx: Any) -> Any:
        from flambeau.cli import setting_options

        ctx.obj = setting_options.read_flags(ctx.params, self.table)
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        from flambeau.cli import setting_options

        setting_options.format_options(ctx, formatter, self.get_params(ctx), self.table)


class LlmSettingsCommand(SettingsCommand):
    table_name = "LLM_SERVE"


class ConfigCommand(SettingsCommand):
    table_name = "EVERY"


def settings_of(ctx: typer.Context, table: Sequence[Setting] | None = None) -> Settings:
    """The settings of a SettingsCommand, or some of them: from flags, variables, the file and the defaults."""
    assert isinstance(ctx.command, SettingsCommand)
    settings: Settings = ctx.obj.resolve(ctx.command.table if table is None else table)
    return settings


GGUF = ".gguf"
WEIGHTS = (".safetensors", ".pth", ".bin", GGUF)
FILES = (*WEIGHTS, ".pt", ".json")  # each may stand for the folder it is in


def check_checkpoint(path: Path, option: str = "") -> None:
    """Reject a path that does not exist or holds no weights; `option` is its name in errors."""
    named = f"{option} {path}" if option else str(path)
    if not path.exists():
        raise ConfigError(f"{named} does not exist; give a checkpoint folder or file{hub_hint(path)}")
    from flambeau.archive.pretrained import reject_adapter  # here: --help does not need it

    reject_adapter(path)
    if path.is_dir() and not any(file.suffix in WEIGHTS for file in path.iterdir()):
        raise ConfigError(f"{named} holds no weights ({', '.join(WEIGHTS)}); give a checkpoint folder")
    if path.is_file() and path.suffix not in FILES:
        raise ConfigError(f"{named} is not a checkpoint; give its folder or its file ({', '.join(WEIGHTS)})")


def checkpoint_folder(path: Path) -> Path:
    """The folder of a checkpoint; a GGUF file is one by itself."""
    return path.parent if path.is_file() and path.suffix != GGUF else path


def hub_hint(path: Path) -> str:
    """The download command for a name of the Hugging Face hub; checkpoints are not downloaded automatically."""
    is_relative = len(path.parts) == 2 and not path.is_absolute() and not path.parts[0].startswith((".", "~"))
    is_hub_name = is_relative and not path.parent.is_dir()  # an existing parent: the second part is misspelled
    return f". To download it from the hub: hf download {path} --local-dir {path.name}" if is_hub_name else ""
