"""Task: what the handler calls. TextTask: batches texts through an encoder.

Shapes: B inputs of a group · T tokens of the longest · C classes
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from flambeau.errors import BadRequest
from flambeau.handlers.embedding.handler import plan_groups
from flambeau.handlers.embedding.sentence_model import num_positions
from flambeau.handlers.loaders.pretrained import Runtime
from flambeau.handlers.onnx.npy import Array
from flambeau.handlers.pretrained.task_request import Kind, TaskRequest

Encoding = dict[str, list[int]]
UNLIMITED = 1 << 30  # tokenizers without a limit have a huge one


class Task(abc.ABC):
    """Turns requests into inputs of the network, runs them together, and makes the replies."""

    known: ClassVar[Mapping[str, Kind]]  # the parameters of a request
    fields: ClassVar[Sequence[str]] = ()  # the keys of an input that is an object
    is_binary: ClassVar[bool] = False  # an input is an image or a sound
    abilities: Sequence[str] = ()  # what front ends may ask for besides predictions
    # Tensors for KServe's metadata; the default reply is a list of objects, as one JSON text.
    input_shapes: ClassVar[Mapping[str, list[int]]] = {"inputs": [-1]}
    output_types: ClassVar[Mapping[str, str]] = {"outputs": "BYTES"}

    @abc.abstractmethod
    def prepare(self, request: TaskRequest) -> list[Any]:
        """The inputs of the network for one request; BadRequest if it has invalid ones."""

    @abc.abstractmethod
    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """One output per input, computed in as few calls as possible."""

    @abc.abstractmethod
    def reply(self, request: TaskRequest, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """The reply to one request, in the form of transformers' pipelines."""

    def describe(self) -> dict[str, Any]:
        return {}


class TextTask(Task):
    """Encodes texts, and computes those of similar length together."""

    auto_class: ClassVar[str]
    per_token: ClassVar[bool] = False  # the logits have a token axis, from which padding is removed

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.tokenizer = runtime.load_part("AutoTokenizer")
        self.model = runtime.load_model(self.auto_class)
        self.config = self.model.config
        self.limit = token_limit(self.config, self.tokenizer)
        # Without a padding token on both sides a text must be computed alone.
        self.pads = self.tokenizer.pad_token_id is not None and self.config.pad_token_id is not None
        self._extra = {"use_cache": False} if "use_cache" in inspect.signature(self.model.forward).parameters else {}

    def encode(self, text: str, pair: str | None = None, *, truncates: bool = False, **options: Any) -> Any:
        """The tokens of a text, or of a pair; too many are an error, unless the request allows truncation."""
        first = {"truncation": "only_first" if pair is not None else True, "max_length": self.limit}
        encoding = self.tokenizer(text, pair, **(first if truncates and self.limit < UNLIMITED else {}), **options)
        count = len(encoding["input_ids"])
        if count > self.limit:
            raise BadRequest(
                f"the text has {count} tokens, and the model takes {self.limit}; shorten it, or send "
                '"parameters": {"truncation": true} (at /v1: "truncate_prompt_tokens": -1)'
            )
        return encoding

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """The logits of each encoding as a float32 array, without padding."""
        lengths = [len(encoding["input_ids"]) for encoding in inputs]
        groups = plan_groups(lengths, self.runtime.max_tokens) if self.pads else [[i] for i in range(len(inputs))]
        found: dict[int, Any] = {}
        for places in groups:
            outputs = self.forward([inputs[place] for place in places])
            for row, place in enumerate(places):
                own = [output[row] for output in outputs]
                own = [output[: lengths[place]] for output in own] if self.per_token else own
                found[place] = own[0] if len(own) == 1 else own
        return [found[place] for place in range(len(inputs))]

    def forward(self, encodings: Sequence[Mapping[str, Any]]) -> list[Array]:
        """The network's outputs for one group."""
        with torch.inference_mode():
            batch = {name: t.to(self.runtime.device) for name, t in self.pad(encodings).items()}
            return self.outputs(self.model(**batch, **self._extra))

    def outputs(self, result: Any) -> list[Array]:
        return [to_array(result.logits)]

    def pad(self, encodings: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Tensors BT of the tokenizer's model inputs, padded on the right."""
        width = max(len(encoding["input_ids"]) for encoding in encodings)
        fills = {"input_ids": self.tokenizer.pad_token_id or 0, "token_type_ids": self.tokenizer.pad_token_type_id}
        names = [name for name in self.tokenizer.model_input_names if name in encodings[0]]
        return {
            name: torch.tensor([[*e[name], *[fills.get(name, 0)] * (width - len(e[name]))] for e in encodings])
            for name in names
        }

    def label(self, index: int) -> str:
        return str(self.config.id2label.get(index, index))

    def describe(self) -> dict[str, Any]:
        return {"maxTokens": self.limit if self.limit < UNLIMITED else None}


def token_limit(config: Any, tokenizer: Any) -> int:
    """The most tokens of an input: the smaller of the network's positions and the tokenizer's limit."""
    limits = (num_positions(config.to_dict()), tokenizer.model_max_length)
    return min((n for n in limits if isinstance(n, int) and 0 < n < UNLIMITED), default=UNLIMITED)


def to_array(tensor: torch.Tensor) -> Array:
    array: Array = tensor.float().cpu().numpy()
    return array


def softmax(scores: Array) -> Array:
    shifted: Array = np.exp(scores - scores.max(-1, keepdims=True))
    result: Array = shifted / shifted.sum(-1, keepdims=True)
    return result


def sigmoid(scores: Array) -> Array:
    result: Array = 1.0 / (1.0 + np.exp(-scores))
    return result
