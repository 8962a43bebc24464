"""AudioTask: reads sounds for a network. Audio classification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from flambeau.errors import BadRequest
from flambeau.handlers.loaders.pretrained import Runtime
from flambeau.handlers.onnx.npy import Array
from flambeau.handlers.pretrained.audio import read_audio
from flambeau.handlers.pretrained.task import Task, to_array
from flambeau.handlers.pretrained.task_request import Kind, TaskRequest
from flambeau.handlers.pretrained.text_tasks import FUNCTIONS, rank_labels

DEFAULT_RATE = 16_000
MAX_SOUNDS = 32  # in one call of the network


class AudioTask(Task):
    """Reads sounds at the network's rate, and computes those together whose features have the same shape.

    Sounds are not padded to each other's length: not every network has a mask for the padding.
    """

    is_binary = True
    fields = ("array", "raw", "sampling_rate")

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.extractor = runtime.load_part("AutoFeatureExtractor")
        self.rate: int = getattr(self.extractor, "sampling_rate", DEFAULT_RATE)
        self.model = self.load()
        self.config = self.model.config

    def load(self) -> Any:
        raise NotImplementedError

    def prepare(self, request: TaskRequest) -> list[Any]:
        return [self.entry(read_audio(item, self.rate)) for item in request.items]

    def entry(self, samples: Array) -> dict[str, Any]:
        """The tensors of one sound, and its length."""
        return {**self.features(samples), "duration": len(samples) / self.rate}

    def features(self, samples: Array) -> dict[str, Any]:
        """The tensors of one sound."""
        least = self.least_samples()
        if len(samples) < least:
            raise BadRequest(
                f"the sound is {len(samples) / self.rate:.3f} s long; the model needs {least / self.rate:.3f} s or more"
            )
        found = self.extractor(samples, sampling_rate=self.rate, return_tensors="pt")
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def least_samples(self) -> int:
        """The samples that the convolutions of a waveform model need for one output."""
        kernels, strides = getattr(self.config, "conv_kernel", None), getattr(self.config, "conv_stride", None)
        if not kernels or not strides or "input_values" not in self.extractor.model_input_names:
            return 1
        length = 1
        for kernel, stride in reversed([*zip(kernels, strides, strict=True)]):
            length = (length - 1) * stride + kernel
        return int(length)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        groups: dict[Any, list[int]] = {}
        for i, entry in enumerate(inputs):
            groups.setdefault(self.group_of(entry), []).append(i)
        found: dict[int, Any] = {}
        for members in groups.values():
            for begin in range(0, len(members), MAX_SOUNDS):
                own = members[begin : begin + MAX_SOUNDS]
                found |= zip(own, self.forward([inputs[i] for i in own]), strict=True)
        return [found[i] for i in range(len(inputs))]

    def group_of(self, entry: Mapping[str, Any]) -> Any:
        return tuple(
            (name, value.shape if isinstance(value, torch.Tensor) else value)
            for name, value in entry.items()
            if name != "duration"
        )

    def forward(self, entries: Sequence[Mapping[str, Any]]) -> list[Any]:
        with torch.inference_mode():
            return [*to_array(self.model(**self.join(entries)).logits)]

    def join(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        names = [name for name, value in entries[0].items() if isinstance(value, torch.Tensor)]
        joined = {name: torch.cat([entry[name] for entry in entries]) for name in names}
        return {
            name: tensor.to(self.runtime.device, self.model.dtype if tensor.is_floating_point() else None)
            for name, tensor in joined.items()
        }

    def describe(self) -> dict[str, Any]:
        return {"samplingRate": self.rate}


class AudioClassification(AudioTask):
    """The labels of a sound, the most probable first."""

    known: ClassVar[Mapping[str, Kind]] = {"top_k": "count", "function_to_apply": (*FUNCTIONS,)}

    def load(self) -> Any:
        return self.runtime.load_model("AutoModelForAudioClassification")

    def reply(self, request: TaskRequest, inputs: Sequence[Any], outputs: Sequence[Array]) -> Any:
        function = FUNCTIONS[request.parameters.get("function_to_apply") or "softmax"]
        top_k = request.parameters.get("top_k")
        replies = [rank_labels(function(logits), self.label)[:top_k] for logits in outputs]
        return replies if request.is_many else replies[0]

    def label(self, index: int) -> str:
        return str(self.config.id2label.get(index, index))
