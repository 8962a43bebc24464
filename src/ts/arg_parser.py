"""TorchServe's import name for the parsers of the command line."""

from flambeau.torchserve.flags import ArgParser as ArgParser
