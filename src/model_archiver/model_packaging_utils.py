"""What scripts import from `model_archiver.model_packaging_utils`."""

import zipfile  # noqa: F401  (TorchServe's tests patch `zipfile.ZipFile` by way of this module)

from flambeau.torchserve.model_archiver import ModelArchiverError as ModelArchiverError
from flambeau.torchserve.model_archiver import ModelExportUtils as ModelExportUtils
from flambeau.torchserve.model_archiver import archiving_options as archiving_options
from flambeau.torchserve.model_archiver import model_handlers as model_handlers
