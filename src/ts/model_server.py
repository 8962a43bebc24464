"""TorchServe's name for the `torchserve` command: `python -m ts.model_server`."""

from __future__ import annotations

from pathlib import Path

from flambeau.torchserve.command import main as start
from flambeau.torchserve.config_properties import read_file
from flambeau.torchserve.pid_file import SIGN as TS_NAMESPACE
from ts.version import __version__ as __version__

__all__ = ["TS_NAMESPACE", "load_properties", "start"]


def load_properties(file_path: str) -> dict[str, str]:
    """The keys and values of a config.properties."""
    return read_file(Path(file_path))


if __name__ == "__main__":
    start()
