"""What handlers import from `ts.torch_handler.object_detector`."""

from flambeau.handlers.vision_handlers import ObjectDetector as ObjectDetector
