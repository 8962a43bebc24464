"""What handlers import from `ts.torch_handler.vision_handler`."""

from flambeau.handlers.vision_handlers import VisionHandler as VisionHandler
