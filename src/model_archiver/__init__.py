"""TorchServe's import name for making model archives; what it does is in `flambeau.archive`."""

from flambeau import __version__ as __version__
from model_archiver.model_archiver import ModelArchiver as ModelArchiver
from model_archiver.model_archiver_config import ModelArchiverConfig as ModelArchiverConfig
