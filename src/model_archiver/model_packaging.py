"""TorchServe's import name for the `torch-model-archiver` command."""

from flambeau.torchserve import import_names, model_archiver
from flambeau.torchserve.model_archiver import ModelArchiverArgParser
from flambeau.torchserve.model_archiver import ModelArchiverConfig as ModelArchiverConfig
from flambeau.torchserve.model_archiver import ModelArchiverError as ModelArchiverError
from flambeau.torchserve.model_archiver import ModelExportUtils as ModelExportUtils
from flambeau.torchserve.model_archiver import generate_model_archive as generate_model_archive
from flambeau.torchserve.model_archiver import package_model as package_model

ArgParser = ModelArchiverArgParser

import_names.forward(__name__, model_archiver, ArgParser="ModelArchiverArgParser")

if __name__ == "__main__":
    generate_model_archive()
