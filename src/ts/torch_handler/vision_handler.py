"""What handlers import from `ts.torch_handler.vision_handler`."""

from flambeau.handlers.vision import VisionHandler as VisionHandler
