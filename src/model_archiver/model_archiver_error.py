"""What scripts import from `model_archiver.model_archiver_error`."""

from flambeau.torchserve.model_archiver import ModelArchiverError as ModelArchiverError
