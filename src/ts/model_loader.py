"""TorchServe's import name for the loader of a model folder."""

from flambeau.torchserve.worker_protocol.service import ModelLoader as ModelLoader
from flambeau.torchserve.worker_protocol.service import ModelLoaderFactory as ModelLoaderFactory
from flambeau.torchserve.worker_protocol.service import TsModelLoader as TsModelLoader
