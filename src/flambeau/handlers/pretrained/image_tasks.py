"""Image classification and object detection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from flambeau.errors import BadRequest
from flambeau.handlers.loaders.pretrained import Runtime
from flambeau.handlers.pretrained.task import Task, to_array
from flambeau.handlers.pretrained.task_request import Kind, TaskRequest, kind_of
from flambeau.handlers.pretrained.text_tasks import FUNCTIONS, default_function, rank_labels
from flambeau.handlers.request_rows import decode_base64
from flambeau.handlers.vision_handlers import open_image

MAX_IMAGES = 64  # in one call of the network


class ImageTask(Task):
    """Decodes and prepares each image; those of equal shape are computed together.

    Images are never padded to each other's size, since padding would change the result.
    """

    auto_class: ClassVar[str]
    is_binary = True
    fields = ("image",)

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.processor = runtime.load_part("AutoImageProcessor")
        self.model = runtime.load_model(self.auto_class)
        self.config = self.model.config

    def prepare(self, request: TaskRequest) -> list[Any]:
        images = [open_image(read_bytes(item, "an image")) for item in request.items]
        return [{"tensors": self.processor(images=[image], return_tensors="pt"), "image": image} for image in images]

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        groups: dict[Any, list[int]] = {}
        for i, entry in enumerate(inputs):
            groups.setdefault(tuple((k, t.shape) for k, t in tensors_of(entry).items()), []).append(i)
        found: dict[int, Any] = {}
        for members in groups.values():
            for begin in range(0, len(members), MAX_IMAGES):
                own = members[begin : begin + MAX_IMAGES]
                found |= zip(own, self.forward([inputs[i] for i in own]), strict=True)
        return [found[i] for i in range(len(inputs))]

    def forward(self, entries: Sequence[Mapping[str, Any]]) -> list[Any]:
        names = tensors_of(entries[0])
        with torch.inference_mode():
            batch = {name: torch.cat([entry["tensors"][name] for entry in entries]) for name in names}
            result = self.model(**{name: self.place(tensor) for name, tensor in batch.items()})
            return self.split(result, entries)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.runtime.device, self.model.dtype if tensor.is_floating_point() else None)

    def split(self, result: Any, entries: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [*to_array(result.logits)]

    def label(self, index: int) -> str:
        return str(self.config.id2label.get(index, index))


class ImageClassification(ImageTask):
    """The most probable labels of an image, five unless `top_k` says otherwise."""

    auto_class = "AutoModelForImageClassification"
    known: ClassVar[Mapping[str, Kind]] = {"top_k": "count", "function_to_apply": (*FUNCTIONS,)}

    def reply(self, request: TaskRequest, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        function = request.parameters.get("function_to_apply") or default_function(self.config)
        top_k = request.parameters.get("top_k") or 5
        replies = [rank_labels(FUNCTIONS[function](logits), self.label)[:top_k] for logits in outputs]
        return replies if request.is_many else replies[0]


class ObjectDetection(ImageTask):
    """The objects in an image, with a score of at least `threshold`, and their boxes in its pixels."""

    auto_class = "AutoModelForObjectDetection"
    known: ClassVar[Mapping[str, Kind]] = {"threshold": "number"}

    def split(self, result: Any, entries: Sequence[Mapping[str, Any]]) -> list[Any]:
        sizes = torch.tensor([[entry["image"].height, entry["image"].width] for entry in entries])
        found = self.processor.post_process_object_detection(result, 0.0, sizes.to(self.runtime.device))
        return [{name: tensor.float().cpu() for name, tensor in objects.items()} for objects in found]

    def reply(self, request: TaskRequest, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        threshold = request.parameters.get("threshold")
        threshold = 0.5 if threshold is None else threshold
        replies = [self.objects(found, threshold) for found in outputs]
        return replies if request.is_many else replies[0]

    def objects(self, found: Mapping[str, torch.Tensor], threshold: float) -> list[dict[str, Any]]:
        rows = zip(found["scores"].tolist(), found["labels"].tolist(), found["boxes"].int().tolist(), strict=True)
        return [
            {
                "score": score,
                "label": self.label(int(label)),
                "box": dict(zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)),
            }
            for score, label, box in rows
            if score > threshold
        ]


def tensors_of(entry: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in entry["tensors"].items() if isinstance(value, torch.Tensor)}


def read_bytes(item: Any, what: str) -> bytes:
    """A file's bytes, or its base64 text, also as a data URL; addresses are not fetched."""
    if isinstance(item, Mapping) and len(item) == 1:
        item = next(iter(item.values()))
    if isinstance(item, (bytes, bytearray, memoryview)):
        return bytes(item)
    if not isinstance(item, str):
        raise BadRequest(f"{what} must be sent as bytes, or as base64 text in JSON, not as {kind_of(item)}")
    if item.startswith(("http://", "https://")):
        raise BadRequest("the server fetches no addresses; send the file itself, or its base64 text")
    return decode_base64(item.partition(",")[2] if item.startswith("data:") else item)
