"""ImageClassifier, ImageSegmenter and ObjectDetector."""

from __future__ import annotations

import abc
import io
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from flambeau.errors import BadRequest
from flambeau.handlers.attribution import integrated_gradients, recordable, with_gradients
from flambeau.handlers.base import BaseHandler
from flambeau.handlers.labels import map_class_to_label
from flambeau.handlers.options import handler_options, read_count, read_number
from flambeau.handlers.profiler import timed
from flambeau.handlers.request_rows import content_of, decode_base64, target_of
from flambeau.wire.example_requests import PICTURE

try:
    from PIL import Image, ImageOps, UnidentifiedImageError
except ImportError as error:
    raise ImportError("image handlers need Pillow: pip install 'flambeau[vision]'") from error

try:
    from torchvision import transforms
except ImportError as error:
    raise ImportError("image handlers need torchvision: pip install 'flambeau[vision]'") from error
except RuntimeError as error:  # its operators were compiled for another torch
    raise ImportError(
        f"torchvision does not match torch {torch.__version__} ({error}): install both from one index, "
        "with pip install 'flambeau[vision]'"
    ) from error

if TYPE_CHECKING:
    from flambeau.worker.context import Context

EXPLAIN_STEPS = 15

imagenet_processing = transforms.Compose(
    [
        transforms.Resize(256),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    ]
)
plain_processing = transforms.ToTensor()
TOO_LARGE = (Image.DecompressionBombError, Image.DecompressionBombWarning)


class VisionHandler(BaseHandler, abc.ABC):
    """Reads images into a batch of tensors; subclasses set `image_processing` and define `postprocess`.

    A request holds an image file, its base64 text, or nested lists of numbers, which are not processed.
    """

    abilities = ("image",)  # the form of the console
    image_processing: Callable[[Any], torch.Tensor] = plain_processing
    tensor_dimensions: int | None = None  # of nested lists; None for any number

    def initialize(self, context: Context) -> None:
        """Load the model; lift PIL's limit of pixels if the server is configured so."""
        super().initialize(context)
        if self.example is None and type(self).preprocess is VisionHandler.preprocess:
            self.example = PICTURE
        if not context.system_properties.get("limit_max_image_pixels", True):
            allow_any_size()

    @cached_property
    def ig(self) -> Any:
        """Captum's IntegratedGradients of the model."""
        return integrated_gradients(self.model)

    @timed
    def preprocess(self, data: Sequence[Any]) -> Any:
        """Requests → one tensor of stacked images."""
        return torch.stack(self.read_images(data)).to(self.device)

    def read_images(self, data: Sequence[Any]) -> list[torch.Tensor]:
        return [self.read_image(content_of(row)) for row in data]

    def read_image(self, value: Any) -> torch.Tensor:
        if isinstance(value, str):
            value = decode_base64(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            # A handler with its own processing gets the image unchanged: those of MNIST are gray.
            as_rgb = self.image_processing in (imagenet_processing, plain_processing)
            return self.image_processing(open_image(value, as_rgb=as_rgb))
        return to_float_tensor(value, self.tensor_dimensions)

    def get_insights(self, tensor_data: torch.Tensor, _: Any, target: Any = 0) -> list[Any]:
        """Attribution of each input number to the score of class `target`, by integrated gradients."""
        number = target_of(target)
        inputs = tensor_data.to(self.device, self.dtype)
        attributions: torch.Tensor = with_gradients(
            lambda: self.ig.attribute(recordable(inputs), target=number, n_steps=EXPLAIN_STEPS), number
        )
        insights: list[Any] = attributions.detach().tolist()
        return insights


class ImageClassifier(VisionHandler):
    """Returns the most probable classes with their probabilities; `handler: topk` sets their number."""

    handler_keys = ("topk",)
    topk = 5
    names_classes = True
    image_processing = imagenet_processing
    tensor_dimensions = 3

    def initialize(self, context: Context) -> None:
        super().initialize(context)
        self.topk = read_count(handler_options(context.model_yaml_config), "topk", self.topk)

    def set_max_result_classes(self, topk: int) -> None:
        self.topk = topk

    def get_max_result_classes(self) -> int:
        return self.topk

    @timed
    def postprocess(self, data: torch.Tensor) -> list[Any]:
        """Scores → one dict of label → probability per image, in descending order."""
        probabilities = torch.nn.functional.softmax(data, dim=1)
        values, classes = torch.topk(probabilities, min(self.topk, probabilities.shape[1]), dim=1)
        return map_class_to_label(values.tolist(), self.mapping, classes.tolist())


class ImageSegmenter(VisionHandler):
    """Returns the most probable class of each pixel and its probability."""

    image_processing = imagenet_processing
    tensor_dimensions = 3

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """The `out` of a segmentation model, N × classes × H × W → H × W × [class, probability] per image."""
        values, classes = torch.nn.functional.softmax(data["out"], dim=1).max(dim=1)
        result: list[Any] = torch.stack([classes.type(values.dtype), values], dim=3).tolist()
        return result

    def get_insights(self, tensor_data: torch.Tensor, _: Any, target: Any = 0) -> list[Any]:
        raise BadRequest("image_segmenter has no explanations; pack a handler of your own with get_insights")


class ObjectDetector(VisionHandler):
    """Returns the objects in an image: label, box and score; `handler: threshold` is the lowest score."""

    handler_keys = ("threshold",)
    threshold = 0.5
    names_classes = True
    image_processing = plain_processing
    tensor_dimensions = 3

    def initialize(self, context: Context) -> None:
        super().initialize(context)
        self.threshold = read_number(handler_options(context.model_yaml_config), "threshold", self.threshold)

    @timed
    def preprocess(self, data: Sequence[Any]) -> Any:
        """Requests → one tensor if all images have the same size, else a list of tensors."""
        images = self.read_images(data)
        if len({image.shape for image in images}) == 1:
            return torch.stack(images).to(self.device)
        return [image.to(self.device) for image in images]

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the model with a stacked batch; with a list if sizes differ or its TorchScript signature has one."""
        is_stacked = isinstance(data, torch.Tensor) and not takes_a_list(self.model)
        place = (self.device, self.dtype)
        inputs = data.to(*place) if is_stacked else [image.to(*place) for image in data]
        with torch.inference_mode():
            return self.model(inputs, *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Detections → a list of objects per image, in the model's order."""
        if isinstance(data, tuple):  # scripted torchvision detectors return (losses, detections)
            data = data[1]
        return [self.to_objects(detections) for detections in data]

    def to_objects(self, detections: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        """The objects of one image with a score of at least `threshold`."""
        boxes, labels, scores = (detections[key].tolist() for key in ("boxes", "labels", "scores"))
        names = self.mapping
        return [
            {(names[str(label)] if names is not None else str(label)): box, "score": score}
            for box, label, score in zip(boxes, labels, scores, strict=True)
            if score >= self.threshold
        ]

    def get_insights(self, tensor_data: torch.Tensor, _: Any, target: Any = 0) -> list[Any]:
        raise BadRequest("object_detector has no explanations; pack a handler of your own with get_insights")


def takes_a_list(model: Any) -> bool:
    """Whether a TorchScript model declares a list of images as its input."""
    schema = getattr(getattr(model, "forward", None), "schema", None)
    return schema is not None and len(schema.arguments) > 1 and str(schema.arguments[1].type).startswith("List")


def allow_any_size() -> None:
    """Remove PIL's limit on the number of pixels."""
    Image.MAX_IMAGE_PIXELS = None


def open_image(data: bytes | bytearray | memoryview, *, as_rgb: bool = True) -> Image.Image:
    """Decode an image fully; to RGB, or with its own channels."""
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
        ImageOps.exif_transpose(image, in_place=True)  # upright, as every viewer shows it
        return to_rgb(image) if as_rgb else image
    except TOO_LARGE:
        raise BadRequest(
            f"the image has more pixels than the limit (about {2 * (Image.MAX_IMAGE_PIXELS or 0):,}); "
            "send a smaller one, or set limit_max_image_pixels=false"
        ) from None
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise BadRequest(f"the {len(data)} bytes are not an image in a format that can be read") from None
    except Exception as error:  # decoders raise any exception for damaged files
        raise BadRequest(f"the image cannot be decoded: {error}") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to three channels: gray is repeated, alpha is dropped."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):  # Pillow would clip 16 bits to the lowest 8
        image = image.convert("I").point(lambda value: value * (1 / 256))
    return image.convert("RGB")


def to_float_tensor(values: Any, dimensions: int | None) -> torch.Tensor:
    """Nested lists of numbers as a tensor; `dimensions` is their required number, if any."""
    if not isinstance(values, (list, tuple, torch.Tensor)):
        kind = "an object" if isinstance(values, dict) else type(values).__name__
        raise BadRequest(f"send an image as bytes, as base64 text or as nested lists of numbers, not as {kind}")
    try:
        tensor = torch.as_tensor(values, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise BadRequest(f"the nested lists are not a tensor: {error}") from None
    if dimensions is not None and tensor.dim() != dimensions:
        raise BadRequest(
            f"the nested lists must have {dimensions} dimensions (channels, height, width); "
            f"they have {tensor.dim()}: {[*tensor.shape]}"
        )
    if tensor.numel() == 0:
        raise BadRequest("the nested lists hold no numbers")
    if not torch.isfinite(tensor).all():
        raise BadRequest("the nested lists hold NaN, Infinity or a number beyond float32")
    return tensor
