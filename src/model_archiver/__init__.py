"""TorchServe's import names for making model archives: re-exports, no behavior."""

from flambeau.torchserve import TORCHSERVE_VERSION
from flambeau.torchserve.model_archiver import ModelArchiver as ModelArchiver
from flambeau.torchserve.model_archiver import ModelArchiverConfig as ModelArchiverConfig

__version__ = TORCHSERVE_VERSION
