"""What a command line names as a checkpoint: refused at once where it cannot be one."""

from __future__ import annotations

from pathlib import Path

from flambeau.errors import ConfigError

WEIGHTS = (".safetensors", ".pth", ".bin")
FILES = (*WEIGHTS, ".pt", ".json")  # that stand for the folder they are in


def check(path: Path, option: str = "") -> None:
    """Refuse what is not there, and what holds no weights; `option` is what named it."""
    named = f"{option} {path}" if option else str(path)
    if not path.exists():
        raise ConfigError(f"{named} does not exist; name the folder of a checkpoint, or its file{hub_hint(path)}")
    if path.is_dir() and not any(file.suffix in WEIGHTS for file in path.iterdir()):
        raise ConfigError(f"{named} holds no weights ({', '.join(WEIGHTS)}); name the folder of a checkpoint")
    if path.is_file() and path.suffix not in FILES:
        raise ConfigError(f"{named} is no checkpoint; name the folder of one, or its file ({', '.join(WEIGHTS)})")


def folder_of(path: Path) -> Path:
    """The folder of a checkpoint, where a file in it may be named."""
    return path.parent if path.is_file() else path


def hub_hint(path: Path) -> str:
    """What to do about a name of the Hugging Face hub, which nothing is downloaded from unasked."""
    is_relative = len(path.parts) == 2 and not path.is_absolute() and not path.parts[0].startswith((".", "~"))
    is_hub_name = is_relative and not path.parent.is_dir()  # where it is one, only the rest is wrong
    return f". To fetch one from the hub: hf download {path} --local-dir {path.name}" if is_hub_name else ""
