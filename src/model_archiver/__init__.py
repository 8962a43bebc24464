"""TorchServe's import names for making model archives: re-exports, no behavior."""

from flambeau import __version__ as __version__
from flambeau.torchserve.model_archiver import ModelArchiver as ModelArchiver
from flambeau.torchserve.model_archiver import ModelArchiverConfig as ModelArchiverConfig
