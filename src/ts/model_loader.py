"""TorchServe's import name for the loader of a model folder."""

from flambeau.torchserve.otf.service import ModelLoader as ModelLoader
from flambeau.torchserve.otf.service import ModelLoaderFactory as ModelLoaderFactory
from flambeau.torchserve.otf.service import TsModelLoader as TsModelLoader
