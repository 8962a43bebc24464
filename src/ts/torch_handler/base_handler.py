"""What handlers import from `ts.torch_handler.base_handler`."""

from flambeau.handlers.base import BaseHandler as BaseHandler
from flambeau.handlers.loaders.programs import setup_ort_session as setup_ort_session
from flambeau.torchserve.handlers.functions import IPEX_AVAILABLE as IPEX_AVAILABLE
from flambeau.torchserve.handlers.functions import ONNX_AVAILABLE as ONNX_AVAILABLE
from flambeau.torchserve.handlers.functions import PROFILER_AVAILABLE as PROFILER_AVAILABLE
from flambeau.torchserve.handlers.functions import PT2_AVAILABLE as PT2_AVAILABLE
from flambeau.torchserve.handlers.functions import PT230_AVAILABLE as PT230_AVAILABLE
from flambeau.torchserve.handlers.functions import XLA_AVAILABLE as XLA_AVAILABLE
