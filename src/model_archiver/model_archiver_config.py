"""What scripts import from `model_archiver.model_archiver_config`."""

from flambeau.torchserve.model_archiver import ModelArchiverConfig as ModelArchiverConfig
