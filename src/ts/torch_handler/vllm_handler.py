"""What handlers import from `ts.torch_handler.vllm_handler`."""

from flambeau.torchserve.handlers.legacy import VLLMHandler as VLLMHandler
