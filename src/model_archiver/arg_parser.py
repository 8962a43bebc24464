"""What scripts import from `model_archiver.arg_parser`."""

from flambeau.torchserve.model_archiver import ModelArchiverArgParser

ArgParser = ModelArchiverArgParser
