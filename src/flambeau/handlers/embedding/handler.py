"""SentenceEmbedder: serves a sentence-transformers folder without code, with PyTorch or ONNX Runtime."""

from __future__ import annotations

import base64
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from flambeau.errors import BadRequest, HandlerError, InvalidField
from flambeau.handlers.device import choose_threads
from flambeau.handlers.embedding.embed_request import INPUT_TYPES, EmbedRequest, read_embed_request
from flambeau.handlers.embedding.encoders import Encoder, load_encoder
from flambeau.handlers.embedding.sentence_model import (
    STATIC,
    SentenceModel,
    Similarity,
    normalize,
    read_folder,
    similarity,
)
from flambeau.handlers.onnx.npy import Array
from flambeau.handlers.options import read_handler_options, resolve_model_path
from flambeau.handlers.request_rows import is_describe, refuse_explain, value_or_fields

if TYPE_CHECKING:
    from flambeau.worker.context import Context

OPTIONS = {"model_path": str, "max_texts": int, "max_tokens": int, "max_seq_length": int, "matryoshka": bool}
CPU_TOKENS, GPU_TOKENS = 4096, 65536  # per group; larger groups on a CPU take more memory and are not faster
FREE_PADDING = 64  # tokens; less costly than another call of the model
MAX_PADDING_SHARE = 0.25


class SentenceEmbedder:
    """Embeds the texts of a whole batch in groups of similar length."""

    abilities = ("embed", "score")

    def initialize(self, context: Context) -> None:
        """Load the tokenizer and the encoder, and embed a text to learn the dimensions."""
        options = read_handler_options(context, OPTIONS)
        folder = Path(context.system_properties["model_dir"])
        self.model: SentenceModel = read_folder(resolve_model_path(folder, options.get("model_path")))
        self.max_texts: int = options.get("max_texts", 2048)
        is_on_gpu = context.system_properties["gpu_id"] is not None
        self.max_tokens: int = options.get("max_tokens", GPU_TOKENS if is_on_gpu else CPU_TOKENS)
        self.max_seq_length = min(options.get("max_seq_length", self.model.max_seq_length), self.model.max_seq_length)
        self.tokenizer, self.pad_id = load_tokenizer(self.model, self.max_seq_length)
        self.special_ids = {i for i, one in self.tokenizer.get_added_tokens_decoder().items() if one.special}
        self.encoder: Encoder = load_encoder(self.model, context.system_properties["gpu_id"])
        self.dimensions: int = self.embed([each.ids for each in self.tokenize(["first"])])[0].shape[1]
        self.can_shorten: bool = options.get("matryoshka", self.model.config.get("is_matryoshka") is True)

    def handle(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[Any]:
        began = time.perf_counter()
        if is_describe(context):
            return [self.describe_handle()]
        refuse_explain(context, "sentence_embedder")
        requests = [read_embed_request(value_or_fields(row), self.max_texts) for row in data]
        for request in requests:
            self.check_dimensions(request)
        texts = [
            (prompt, text) for request in requests for prompt in [self.prompt_of(request)] for text in request.texts
        ]
        places = {text: i for i, text in enumerate(dict.fromkeys(texts))}  # a query may be in many pairs
        encodings = self.tokenize([prompt + text for prompt, text in places])
        order = [places[text] for text in texts]
        self.check_lengths(requests, [bool(encodings[place].overflowing) for place in order])
        skipped = {prompt: self.count_skipped(prompt) for prompt, _ in places}
        found, lengths = self.embed([each.ids for each in encodings], [skipped[prompt] for prompt, _ in places])
        vectors, counts = found[order], [lengths[place] for place in order]
        replies, taken = [], 0
        for i, request in enumerate(requests):
            own = slice(taken, taken + len(request.texts))
            taken = own.stop
            if request.has_pairs:
                found_here = self.finish(vectors[own], request)
                replies.append(to_scores(found_here, self.model.similarity, sum(counts[own])))
            else:
                replies.append(to_reply(request, self.finish(vectors[own], request), sum(counts[own])))
            context.set_response_content_type(i, "application/json")
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - began) * 1000, 2), None, "ms")
        return replies

    def check_lengths(self, requests: Sequence[EmbedRequest], is_cut: Sequence[bool]) -> None:
        """Reject pairs with a text that is too long: the first ones, which are queries, are never cut."""
        flags = iter(is_cut)
        for request in requests:
            for i, text_is_cut in enumerate(itertools.islice(flags, len(request.texts))):
                if text_is_cut and request.has_pairs and (i % 2 == 0 or not request.truncates):
                    remedy = "" if i % 2 == 0 else ', or send "truncate_prompt_tokens": -1'
                    raise BadRequest(
                        f"the {'first' if i % 2 == 0 else 'second'} text of pair {i // 2} has more than "
                        f"{self.max_seq_length} tokens, which is the model's limit; shorten it{remedy}"
                    )

    def embed(self, tokens: Sequence[Sequence[int]], skipped: Sequence[int] | None = None) -> tuple[Array, list[int]]:
        """The vectors of tokenized texts before normalization, in order, and the number of tokens of each text.

        `skipped` has how many of the first tokens of each text are not pooled.
        """
        counts = [len(ids) for ids in tokens]
        groups = plan_groups(counts, self.max_tokens)
        found: dict[int, Array] = {}
        for places in groups:
            ids, mask = pad([tokens[place] for place in places], self.pad_id)
            firsts = np.array([skipped[place] if skipped else 0 for place in places])
            is_pooled = mask & (np.arange(mask.shape[1]) >= firsts[:, None]) if firsts.any() else None
            vectors = self.encoder.embed(ids, mask, is_pooled)
            for step in self.model.steps:
                vectors = step(vectors)
            found |= zip(places, vectors, strict=True)
        return np.stack([found[place] for place in range(len(tokens))]), counts

    def tokenize(self, texts: Sequence[str]) -> list[Any]:
        """The tokens of texts, cut at the model's limit; what was cut off is `overflowing`."""
        if self.model.lowercases:
            texts = [text.lower() for text in texts]
        adds = self.model.config.get("model_type") != STATIC
        return list(self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=adds))

    def count_skipped(self, prompt: str) -> int:
        """The tokens of a prompt that are not pooled: those before the text, with the special ones."""
        if not prompt or not self.model.skips_prompt:
            return 0
        [encoding] = self.tokenize([prompt])
        is_special = encoding.special_tokens_mask[-1] == 1 or encoding.ids[-1] in self.special_ids
        return len(encoding.ids) - is_special

    def check_dimensions(self, request: EmbedRequest) -> None:
        """Reject longer vectors, and shorter ones if the model was not trained for them."""
        wanted = self.dimensions if request.dimensions is None else request.dimensions
        if wanted > self.dimensions:
            text = f"dimensions must be at most {self.dimensions}, the size of the model's vectors"
            raise InvalidField("dimensions", text)
        if wanted < self.dimensions and not self.can_shorten:
            raise InvalidField(
                "dimensions",
                f"the model supports {self.dimensions} dimensions only; leave dimensions out, or set matryoshka: true "
                "in model-config.yaml if the model was trained for shorter vectors",
            )

    def finish(self, vectors: Array, request: EmbedRequest) -> Array:
        """Normalize and shorten vectors.

        Those that a request shortens have a length of one again unless it says otherwise. Those that the model's own
        files shorten have not: sentence-transformers leaves them so.
        """
        wanted, size = request.normalize, request.dimensions
        if self.model.normalizes and wanted is not False:
            vectors = normalize(vectors)
        vectors = vectors[:, : self.model.truncate_dim if size is None else size]
        shortens = size is not None and size < self.dimensions
        return normalize(vectors) if wanted or (wanted is None and shortens) else vectors

    def prompt_of(self, request: EmbedRequest) -> str:
        """The prompt that a request names, or the model's default prompt; it stands before each text."""
        prompts = self.model.prompts
        name = request.prompt_name or self.name_of(request.input_type) or self.model.default_prompt
        if name is None:
            return ""
        if name not in prompts:
            raise InvalidField(
                "prompt_name", f"the model has no prompt {name!r}; it has {', '.join(prompts) or 'none'}"
            )
        return prompts[name]

    def name_of(self, input_type: str | None) -> str | None:
        """The prompt for queries or documents; None if the model has none for them, as documents often have none."""
        if input_type is None:
            return None
        found = next((name for name in INPUT_TYPES[input_type] if name in self.model.prompts), None)
        if found is None and input_type == "query" and self.model.prompts:
            known = ", ".join(self.model.prompts)
            raise InvalidField(
                "input_type", f"none of the model's prompts is that of queries; send prompt_name: {known}"
            )
        return found

    def tensor_metadata(self) -> Any:
        """The tensors for KServe's metadata; the vectors travel as JSON text."""
        texts = {"name": "input", "datatype": "BYTES", "shape": [-1]}
        return {"inputs": [texts], "outputs": [{"name": "embeddings", "datatype": "BYTES", "shape": [1]}]}

    def describe_handle(self) -> Any:
        """Information for `GET /models/NAME?customized=true`."""
        return {
            "dimensions": min(self.dimensions, self.model.truncate_dim or self.dimensions),
            "maxSequenceLength": self.max_seq_length,
            "pooling": list(self.model.modes),
            "normalizes": self.model.normalizes,
            "prompts": list(self.model.prompts),
            "weights": self.model.weights.name,
        }


def to_reply(request: EmbedRequest, vectors: Array, num_tokens: int) -> bytes:
    """The reply to one request: its vectors, with the number of tokens if it asks for usage."""
    if request.encoding_format == "base64":
        found: list[Any] = [base64.b64encode(vector.tobytes()).decode() for vector in vectors.astype("<f4")]
    else:
        found = vectors.tolist()
    if request.usage:
        return msgspec.json.encode({"embeddings": found, "num_tokens": num_tokens})
    return msgspec.json.encode(found[0] if request.is_one else found)


def to_scores(vectors: Array, kind: Similarity, num_tokens: int) -> bytes:
    """The similarity of each pair, as the model's files name it."""
    scores = similarity(vectors[::2], vectors[1::2], kind)
    return msgspec.json.encode({"scores": scores.tolist(), "num_tokens": num_tokens})


def plan_groups(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group texts by index, longest first; a group ends when it is full or has too much padding."""
    groups: list[list[int]] = []
    width = tokens = 0
    for place in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        area = width * (len(groups[-1]) + 1) if groups else 0
        padding = area - tokens - lengths[place]
        if groups and area <= max_tokens and padding <= max(FREE_PADDING, MAX_PADDING_SHARE * tokens):
            groups[-1].append(place)
        else:
            groups.append([place])
            width, tokens = lengths[place], 0
        tokens += lengths[place]
    return groups


def pad(tokens: Sequence[Sequence[int]], pad_id: int) -> tuple[Array, Array]:
    """Token ids padded to one length, and a mask that is true for tokens."""
    lengths = np.array([len(ids) for ids in tokens])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[mask] = np.concatenate([np.asarray(ids, np.int64) for ids in tokens])
    return ids, mask


def load_tokenizer(model: SentenceModel, max_length: int) -> tuple[Any, int]:
    """The tokenizer, set to truncate at `max_length` and not to pad, and its padding token."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(choose_threads()))  # it uses every core of the machine otherwise
    from tokenizers import Tokenizer

    path = model.tokenizer
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise HandlerError(f"{path.name} could not be loaded as a tokenizer: {error}") from error
    pad_id = (tokenizer.padding or {}).get("pad_id", 0)
    tokenizer.no_padding()
    side = model.truncation_side or (tokenizer.truncation or {}).get("direction", "right")
    tokenizer.enable_truncation(max_length, direction=side)
    return tokenizer, pad_id
