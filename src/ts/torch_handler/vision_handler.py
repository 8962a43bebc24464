"""What handlers import from `ts.torch_handler.vision_handler`."""

from flambeau.handlers.vision.handlers import VisionHandler as VisionHandler
