"""TorchServe's import name for the loader of a model folder."""

from flambeau.torchserve import import_names
from flambeau.torchserve.worker_protocol import service
from flambeau.torchserve.worker_protocol.service import ModelLoader as ModelLoader
from flambeau.torchserve.worker_protocol.service import ModelLoaderFactory as ModelLoaderFactory
from flambeau.torchserve.worker_protocol.service import TsModelLoader as TsModelLoader

import_names.forward(__name__, service)
