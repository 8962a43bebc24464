"""What handlers import from `ts.torch_handler.vllm_handler`."""

from flambeau.torchserve.handlers.unsupported import VLLMHandler as VLLMHandler
