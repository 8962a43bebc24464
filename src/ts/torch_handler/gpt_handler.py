"""What handlers import from `ts.torch_handler.gpt_handler`."""

from flambeau.handlers.gpt import GptHandler as GptHandler
