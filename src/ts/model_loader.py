"""TorchServe's import name for the loader of a model folder."""

from flambeau.torchserve.otf.model_loader import ModelLoader as ModelLoader
from flambeau.torchserve.otf.model_loader import ModelLoaderFactory as ModelLoaderFactory
from flambeau.torchserve.otf.model_loader import TsModelLoader as TsModelLoader
