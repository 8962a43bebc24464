"""What handlers import from `ts.torch_handler.trt_llm_handler`."""

from flambeau.torchserve.handlers.legacy import TRTLLMHandler as TRTLLMHandler
