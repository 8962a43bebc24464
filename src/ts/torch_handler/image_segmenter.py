"""What handlers import from `ts.torch_handler.image_segmenter`."""

from flambeau.handlers.vision_handlers import ImageSegmenter as ImageSegmenter
