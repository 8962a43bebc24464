"""TorchServe's handlers for other engines: they exist by name and name a replacement."""

from __future__ import annotations

from flambeau.errors import HandlerError


class ReplacedHandler:
    """A handler that this server does not support; creating one raises the remedy."""

    remedy = ""

    def __init__(self) -> None:
        raise HandlerError(f"{type(self).__name__} is not a handler of this server: {self.remedy}")


class VLLMHandler(ReplacedHandler):
    """TorchServe's wrapper of vLLM."""

    remedy = "use gpt_handler, this server's own engine, or pack a handler of your own that imports vllm"


class TRTLLMHandler(ReplacedHandler):
    """TorchServe's wrapper of TensorRT-LLM."""

    remedy = "use gpt_handler, this server's own engine, or pack a handler of your own that imports tensorrt_llm"
