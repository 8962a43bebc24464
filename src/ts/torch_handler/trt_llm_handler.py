"""What handlers import from `ts.torch_handler.trt_llm_handler`."""

from flambeau.handlers.replaced import TRTLLMHandler as TRTLLMHandler
