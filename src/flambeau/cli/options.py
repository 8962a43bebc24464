"""Options and defaults that several commands share, and the check of a checkpoint path."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flambeau.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Inference = Annotated[str, typer.Option("--url", envvar="FLAMBEAU_URL", help="Address of the inference API.")]
Management = Annotated[
    str, typer.Option("--url", envvar="FLAMBEAU_MANAGEMENT_URL", help="Address of the management API.")
]
Version = Annotated[str | None, typer.Option("--version", "-v", help="Model version; the default version if omitted.")]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the inference API; 0 for any free port.")]
ManagementPort = Annotated[int, typer.Option(min=0, max=65535, help="Port of the management API; 0 for any free port.")]
MetricsPort = Annotated[int, typer.Option(min=0, max=65535, help="Port of the metrics API; 0 disables it.")]
RequireToken = Annotated[
    bool | None,
    typer.Option("--require-token/--no-token", help="Require API keys. Default: unless the host is loopback."),
]
KeyFile = Annotated[Path, typer.Option("--key-file", help="File with the keys; see `flambeau keys`.")]
KeyExpiry = Annotated[
    float | None,
    typer.Option(min=1, max=2**31, help="Seconds after which new keys expire. Default: they are valid until revoked."),
]
DEFAULT_KEY_FILE = Path("key_file.json")
AllowUnprotected = Annotated[
    bool, typer.Option("--allow-unprotected", help="Allow --no-token on an address that other machines can reach.")
]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
DEFAULT_INFERENCE, DEFAULT_MANAGEMENT = "http://127.0.0.1:8080", "http://127.0.0.1:8081"


WEIGHTS = (".safetensors", ".pth", ".bin")
FILES = (*WEIGHTS, ".pt", ".json")  # each may stand for the folder it is in


def check_checkpoint(path: Path, option: str = "") -> None:
    """Reject a path that does not exist or holds no weights; `option` is its name in errors."""
    named = f"{option} {path}" if option else str(path)
    if not path.exists():
        raise ConfigError(f"{named} does not exist; give a checkpoint folder or file{hub_hint(path)}")
    if path.is_dir() and not any(file.suffix in WEIGHTS for file in path.iterdir()):
        raise ConfigError(f"{named} holds no weights ({', '.join(WEIGHTS)}); give a checkpoint folder")
    if path.is_file() and path.suffix not in FILES:
        raise ConfigError(f"{named} is not a checkpoint; give its folder or its file ({', '.join(WEIGHTS)})")


def checkpoint_folder(path: Path) -> Path:
    return path.parent if path.is_file() else path


def hub_hint(path: Path) -> str:
    """The download command for a name of the Hugging Face hub; checkpoints are not downloaded automatically."""
    is_relative = len(path.parts) == 2 and not path.is_absolute() and not path.parts[0].startswith((".", "~"))
    is_hub_name = is_relative and not path.parent.is_dir()  # an existing parent: the second part is misspelled
    return f". To download it from the hub: hf download {path} --local-dir {path.name}" if is_hub_name else ""
