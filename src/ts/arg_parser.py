"""TorchServe's import name for the parsers of the command line."""

from flambeau.torchserve.command import ArgParser as ArgParser
