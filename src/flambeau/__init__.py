"""Flambeau, a model server for PyTorch."""

__version__ = "0.1.0"
TORCHSERVE_VERSION = "0.12.0"  # whose interface this is, for scripts and handlers that ask
