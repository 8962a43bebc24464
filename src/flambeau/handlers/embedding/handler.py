"""SentenceEmbedder: texts → vectors, from a sentence-transformers folder and with no code."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.embedding.encoders import Encoder, load_encoder
from flambeau.handlers.embedding.folder import SentenceModel, read_folder
from flambeau.handlers.embedding.pooling import normalize
from flambeau.handlers.embedding.sentences import Ask, read_ask
from flambeau.handlers.loading.threads import choose_threads
from flambeau.handlers.onnx.npy import Array
from flambeau.handlers.options import read_handler_options, resolve_model_path
from flambeau.handlers.requests import is_describe, refuse_explain, value_or_fields

if TYPE_CHECKING:
    from flambeau.worker.context import Context

OPTIONS = {"model_path": str, "max_texts": int, "max_tokens": int, "max_seq_length": int, "matryoshka": bool}
CPU_TOKENS, GPU_TOKENS = 4096, 65536  # a CPU gains nothing from larger groups, which only take more memory
FREE_PADDING = 64  # tokens of padding that cost less than another call of the model
PADDING_SHARE = 0.25


class SentenceEmbedder:
    """Embeds all texts of all requests of a batch together, those of like length side by side."""

    abilities = ("embed",)

    def initialize(self, context: Context) -> None:
        """Read the folder, load the tokenizer and the encoder, and embed a first text."""
        options = read_handler_options(context, OPTIONS)
        folder = Path(context.system_properties["model_dir"])
        self.model: SentenceModel = read_folder(resolve_model_path(folder, options.get("model_path")))
        self.max_texts: int = options.get("max_texts", 2048)
        is_on_gpu = context.system_properties["gpu_id"] is not None
        self.max_tokens: int = options.get("max_tokens", GPU_TOKENS if is_on_gpu else CPU_TOKENS)
        self.max_seq_length = min(options.get("max_seq_length", self.model.max_seq_length), self.model.max_seq_length)
        self.tokenizer, self.pad_id = load_tokenizer(self.model.tokenizer, self.max_seq_length)
        self.encoder: Encoder = load_encoder(self.model, context.system_properties["gpu_id"])
        self.dimensions: int = self.embed(["first"])[0].shape[1]
        self.can_shorten: bool = options.get("matryoshka", self.model.config.get("is_matryoshka") is True)

    def handle(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[Any]:
        """The whole way for one batch; the server calls this."""
        began = time.perf_counter()
        if is_describe(context):
            return [self.describe_handle()]
        refuse_explain(context, "sentence_embedder")
        asks = [read_ask(value_or_fields(row), self.max_texts) for row in data]
        for ask in asks:
            self.check_dimensions(ask)
        vectors, counts = self.embed([text for ask in asks for text in self.with_prompt(ask)])
        replies, taken = [], 0
        for i, ask in enumerate(asks):
            own = slice(taken, taken + len(ask.texts))
            taken = own.stop
            replies.append(to_reply(ask, self.finished(vectors[own], ask), sum(counts[own])))
            context.set_response_content_type(i, "application/json")
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - began) * 1000, 2), None, "ms")
        return replies

    def embed(self, texts: Sequence[str]) -> tuple[Array, list[int]]:
        """The vectors of texts, in their order, before normalization, and how many tokens each text has."""
        if self.model.lowercases:
            texts = [text.lower() for text in texts]
        tokens = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]
        counts = [len(ids) for ids in tokens]
        groups = plan_groups(counts, self.max_tokens)
        found: dict[int, Array] = {}
        for places in groups:
            ids, mask = pad([tokens[place] for place in places], self.pad_id)
            found |= zip(places, self.encoder.embed(ids, mask), strict=True)
        return np.stack([found[place] for place in range(len(tokens))]), counts

    def check_dimensions(self, ask: Ask) -> None:
        """Refuse shorter vectors of a model that was not trained for them, and longer ones of any."""
        wanted = self.dimensions if ask.dimensions is None else ask.dimensions
        if wanted > self.dimensions:
            raise BadRequest(f"dimensions must be at most {self.dimensions}, which is what the model gives")
        if wanted < self.dimensions and not self.can_shorten:
            raise BadRequest(
                f"the model gives {self.dimensions} dimensions and no fewer; leave dimensions out, or set matryoshka: "
                "true in the model's configuration if it was trained for shorter ones"
            )

    def finished(self, vectors: Array, ask: Ask) -> Array:
        """Vectors as a request wants them: shorter ones get their length back."""
        shortens = ask.dimensions is not None and ask.dimensions < self.dimensions
        normalizes = (self.model.normalizes or shortens) if ask.normalize is None else ask.normalize
        vectors = vectors[:, : ask.dimensions]
        return normalize(vectors) if normalizes else vectors

    def with_prompt(self, ask: Ask) -> list[str]:
        """The texts of a request behind the prompt it names, or the model's usual one."""
        name = ask.prompt_name or self.model.default_prompt
        if name is None:
            return list(ask.texts)
        if name not in self.model.prompts:
            known = ", ".join(self.model.prompts) or "none"
            raise BadRequest(f"the model has no prompt {name!r}; it has {known}")
        return [self.model.prompts[name] + text for text in ask.texts]

    def describe_handle(self) -> Any:
        """What the model gives, for `describe?customized=true`."""
        return {
            "dimensions": self.dimensions,
            "maxSequenceLength": self.max_seq_length,
            "pooling": list(self.model.modes),
            "normalizes": self.model.normalizes,
            "prompts": list(self.model.prompts),
            "weights": self.model.weights.name,
        }


def to_reply(ask: Ask, vectors: Array, num_tokens: int) -> bytes:
    """The reply to one request: its vectors, alone or with what they have cost."""
    if ask.encoding_format == "base64":
        found: list[Any] = [base64.b64encode(vector.tobytes()).decode() for vector in vectors.astype("<f4")]
    else:
        found = vectors.tolist()
    if ask.usage:
        return msgspec.json.encode({"embeddings": found, "num_tokens": num_tokens})
    return msgspec.json.encode(found[0] if ask.is_one else found)


def plan_groups(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Which texts run together: the longest first, until a group is full or would be padding in good part."""
    groups: list[list[int]] = []
    width = tokens = 0
    for place in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        area = width * (len(groups[-1]) + 1) if groups else 0
        padding = area - tokens - lengths[place]
        if groups and area <= max_tokens and padding <= max(FREE_PADDING, PADDING_SHARE * tokens):
            groups[-1].append(place)
        else:
            groups.append([place])
            width, tokens = lengths[place], 0
        tokens += lengths[place]
    return groups


def pad(tokens: Sequence[Sequence[int]], pad_id: int) -> tuple[Array, Array]:
    """Token ids as a rectangle, and where they are real."""
    lengths = np.array([len(ids) for ids in tokens])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[mask] = np.concatenate([np.asarray(ids, np.int64) for ids in tokens])
    return ids, mask


def load_tokenizer(path: Path, max_length: int) -> tuple[Any, int]:
    """The tokenizer, cutting texts at `max_length`, and its token for padding, which is left to us."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(choose_threads()))  # it would take every core of the machine
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise HandlerError(f"{path.name} could not be loaded as a tokenizer: {error}") from error
    pad_id = (tokenizer.padding or {}).get("pad_id", 0)
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    return tokenizer, pad_id
