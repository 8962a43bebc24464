"""TorchServe's import name for the `torchserve` command: `python -m ts.model_server`."""

from flambeau.torchserve.command import main as start
from flambeau.torchserve.config_properties import load_properties
from flambeau.torchserve.pid_file import SIGN as TS_NAMESPACE
from ts.version import __version__ as __version__

__all__ = ["TS_NAMESPACE", "load_properties", "start"]

if __name__ == "__main__":
    start()
