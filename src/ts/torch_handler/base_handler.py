from importlib.util import find_spec

from flambeau.handlers.base import BaseHandler
from flambeau.handlers.loaders.programs import setup_ort_session

PROFILER_AVAILABLE = PT2_AVAILABLE = PT230_AVAILABLE = True
XLA_AVAILABLE = find_spec("torch_xla") is not None
IPEX_AVAILABLE = False
ONNX_AVAILABLE = find_spec("onnxruntime") is not None

__all__ = [
    "IPEX_AVAILABLE",
    "ONNX_AVAILABLE",
    "PROFILER_AVAILABLE",
    "PT2_AVAILABLE",
    "PT230_AVAILABLE",
    "XLA_AVAILABLE",
    "BaseHandler",
    "setup_ort_session",
]
