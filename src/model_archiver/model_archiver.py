"""What scripts import from `model_archiver.model_archiver`."""

from flambeau.torchserve.model_archiver import ModelArchiver as ModelArchiver
from flambeau.torchserve.model_archiver import ModelArchiverConfig as ModelArchiverConfig
