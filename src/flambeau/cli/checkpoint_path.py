"""Checks the path of a checkpoint before an engine or a worker starts."""

from __future__ import annotations

from pathlib import Path

from flambeau.errors import ConfigError

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
