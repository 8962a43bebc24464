"""What handlers import from `ts.torch_handler.vllm_handler`."""

from flambeau.handlers.replaced import VLLMHandler as VLLMHandler
