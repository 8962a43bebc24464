"""Text classification, zero-shot classification, ranking and fill-mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.embedding.small_documents import read_json
from flambeau.handlers.loaders.pretrained import Runtime
from flambeau.handlers.onnx.npy import Array
from flambeau.handlers.pretrained.pair_prompts import (
    PairPrompt,
    check_pair,
    encode_pair,
    read_chat_prompt,
    read_default_prompt,
)
from flambeau.handlers.pretrained.task import Encoding, TextTask, sigmoid, softmax
from flambeau.handlers.pretrained.task_request import (
    Kind,
    TaskRequest,
    check_keys,
    only_of,
    read_text,
    read_texts,
)

FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {"softmax": softmax, "sigmoid": sigmoid, "none": lambda s: s}


class PairTask(TextTask):
    """A network that may score pairs of texts, which front ends ask for."""

    auto_class = "AutoModelForSequenceClassification"
    prompt: PairPrompt | None = None  # None: a pair as the tokenizer joins two texts

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.num_labels = self.count_labels()
        self.is_raw, self.prefix = False, ""
        if self.num_labels == 1:
            self.is_raw = is_raw_encoder(self.config, runtime.folder)
            self.prefix = read_default_prompt(runtime.folder)
            self.prompt = read_chat_prompt(runtime.folder, self.tokenizer)
        self.markers = [one.content for one in self.tokenizer.added_tokens_decoder.values() if one.special]

    def count_labels(self) -> int:
        count: int = self.config.num_labels
        return count

    def scores(self, outputs: Sequence[Array], *, is_raw: bool = False) -> Array:
        """One score for each output of a network with one label."""
        logits = np.concatenate(outputs)
        return logits if self.is_raw or is_raw else sigmoid(logits)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], instruction: str | None = None, *, truncates: bool
    ) -> list[Any]:
        """The second text is shortened, never the first, which is the query."""
        if instruction is not None and not (self.prompt and self.prompt.takes_instruction):
            raise BadRequest("the model's prompt has no place for an instruction; leave it out")
        if self.prompt is not None:
            return [self.encode_prompt(pair, instruction, truncates=truncates) for pair in pairs]
        limits: dict[str, Any] = {"truncation": "only_second", "max_length": self.limit} if truncates else {}
        return [self.encode(f"{self.prefix}{query}", text, **limits) for query, text in pairs]

    def encode_prompt(self, pair: tuple[str, str], instruction: str | None, *, truncates: bool) -> Encoding:
        assert self.prompt is not None
        check_pair((*pair, instruction or ""), self.markers)
        ids = encode_pair(self.prompt, self.tokenizer, pair, instruction, self.limit, truncates=truncates)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def pair_reply(self, inputs: Sequence[Any], outputs: Sequence[Array]) -> dict[str, Any]:
        return {"scores": self.scores(outputs).tolist(), "num_tokens": num_tokens(inputs)}


def is_raw_encoder(config: Any, folder: Path) -> bool:
    """Whether the scores of a cross-encoder are its logits; otherwise they are between 0 and 1.

    sentence-transformers has had three places for this: since version 6, a file of its own.
    """
    document = read_json(folder / "config_sentence_transformers.json")
    section = getattr(config, "sentence_transformers", None) or {}
    older = getattr(config, "sbert_ce_default_activation_function", None)
    named = str(document.get("activation_fn") or section.get("activation_fn") or older or "Sigmoid").rpartition(".")[2]
    if named not in ("Identity", "Sigmoid"):
        raise HandlerError(f"the activation_fn {named} of a cross-encoder is not supported; it is Identity or Sigmoid")
    return named == "Identity"


class TextClassification(PairTask):
    """The most probable label of a text, or of a pair of texts; `top_k` gives more of them.

    With one label, the network may be a cross-encoder, so it scores pairs too.
    """

    known: ClassVar[Mapping[str, Kind]] = {
        "top_k": "count",
        "function_to_apply": (*FUNCTIONS,),
        "truncation": "flag",
        "usage": "flag",
    }
    fields = ("text", "text_pair", "pairs")

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.abilities = ("classify", "score") if self.config.num_labels == 1 else ("classify",)

    def prepare(self, request: TaskRequest) -> list[Any]:
        truncates = bool(request.parameters.get("truncation"))
        if "score" in self.abilities and has_pairs(request.inputs):
            return self.encode_pairs(read_pairs(request.inputs), truncates=truncates)
        return [self.encode(*read_pair(item), truncates=truncates) for item in request.items]

    def reply(self, request: TaskRequest, inputs: Sequence[Any], outputs: Sequence[Array]) -> Any:
        function = request.parameters.get("function_to_apply") or default_function(self.config)
        if "score" in self.abilities and has_pairs(request.inputs):
            return self.pair_reply(inputs, outputs)
        if request.parameters.get("usage"):  # from a front end: the probabilities of all classes, in their order
            probs = [FUNCTIONS[function](logits) for logits in outputs]
            classes = [{"label": self.label(int(one.argmax())), "probs": one.tolist()} for one in probs]
            return {"classes": classes, "num_tokens": num_tokens(inputs)}
        ranked = [rank_labels(FUNCTIONS[function](logits), self.label) for logits in outputs]
        if "top_k" in request.parameters:
            best = [labels[: request.parameters["top_k"]] for labels in ranked]
            return best if request.is_many else best[0]
        firsts = [labels[0] for labels in ranked]
        return firsts[0] if isinstance(request.inputs, Mapping) else firsts


class ZeroShotClassification(TextTask):
    """How well labels of the request describe a text: the network says whether the text entails each of them."""

    auto_class = "AutoModelForSequenceClassification"
    known: ClassVar[Mapping[str, Kind]] = {
        "candidate_labels": "texts",
        "hypothesis_template": "text",
        "multi_label": "flag",
        "truncation": "flag",
    }
    fields = ("sequences",)

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        labels = {str(name).lower(): int(i) for name, i in self.config.label2id.items()}
        found = [i for name, i in labels.items() if name.startswith("entail")]
        if not found:
            raise HandlerError(
                f"zero-shot-classification needs a model with a label 'entailment'; {runtime.folder.name} has "
                f"{', '.join(labels)}. Use task: text-classification"
            )
        self.entailment = found[0]
        self.contradiction = -1 if self.entailment == 0 else 0

    def prepare(self, request: TaskRequest) -> list[Any]:
        labels = self.labels(request)
        template = request.parameters.get("hypothesis_template") or "This example is {}."
        if "{}" not in template:
            raise BadRequest(f"hypothesis_template must contain {{}}, the place of the label; it is {template!r}")
        truncates = bool(request.parameters.get("truncation"))
        return [
            self.encode(read_text(text), template.replace("{}", label), truncates=truncates)
            for text in self.texts(request)
            for label in labels
        ]

    def reply(self, request: TaskRequest, inputs: Sequence[Any], outputs: Sequence[Array]) -> Any:
        labels, texts = self.labels(request), self.texts(request)
        logits_NLC = np.stack(outputs).reshape(len(texts), len(labels), -1)
        if request.parameters.get("multi_label") or len(labels) == 1:
            scores_NL = softmax(logits_NLC[..., [self.contradiction, self.entailment]])[..., 1]
        else:
            scores_NL = softmax(logits_NLC[..., self.entailment])
        replies = []
        for text, scores in zip(texts, scores_NL, strict=True):
            order = [*reversed(scores.argsort())]
            found = {"labels": [labels[i] for i in order], "scores": scores[order].tolist()}
            replies.append({"sequence": text, **found})
        return replies if request.is_many else replies[0]

    @staticmethod
    def texts(request: TaskRequest) -> Sequence[Any]:
        inputs = request.inputs
        return [inputs["sequences"]] if isinstance(inputs, Mapping) and "sequences" in inputs else request.items

    @staticmethod
    def labels(request: TaskRequest) -> list[str]:
        given: list[str] = request.parameters.get("candidate_labels") or []
        labels = [label.strip() for text in given for label in (text.split(",") if len(given) == 1 else [text])]
        if not any(labels):
            raise BadRequest('name the labels: "parameters": {"candidate_labels": ["sports", "politics"]}')
        return [label for label in labels if label]


class TextRanking(PairTask):
    """The texts of a request by how well they answer its query, as text-embeddings-inference replies."""

    known: ClassVar[Mapping[str, Kind]] = {
        "raw_scores": "flag",
        "return_text": "flag",
        "top_k": "count",
        "truncation": "flag",
        "truncate": "flag",
        "instruction": "text",
    }
    fields = ("query", "texts", "documents", "pairs")
    abilities = ("score",)
    input_shapes: ClassVar[Mapping[str, list[int]]] = {"query": [1], "texts": [-1]}

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        if self.num_labels != 1:
            raise HandlerError(
                f"text-ranking needs a model with one label; {runtime.folder.name} has {self.config.num_labels}. "
                "Use task: text-classification"
            )

    def prepare(self, request: TaskRequest) -> list[Any]:
        truncates = bool(request.parameters.get("truncation") or request.parameters.get("truncate"))
        instruction = request.parameters.get("instruction")
        if has_pairs(request.inputs):
            return self.encode_pairs(read_pairs(request.inputs), instruction, truncates=truncates)
        query, texts = self.read(request)
        return self.encode_pairs([(query, text) for text in texts], instruction, truncates=truncates)

    def reply(self, request: TaskRequest, inputs: Sequence[Any], outputs: Sequence[Array]) -> Any:
        if has_pairs(request.inputs):
            return self.pair_reply(inputs, outputs)
        scores = self.scores(outputs, is_raw=bool(request.parameters.get("raw_scores")))
        _, texts = self.read(request)
        order = sorted(range(len(texts)), key=lambda i: -scores[i])[: request.parameters.get("top_k")]
        shown = bool(request.parameters.get("return_text"))
        return [{"index": i, "score": float(scores[i])} | ({"text": texts[i]} if shown else {}) for i in order]

    def read(self, request: TaskRequest) -> tuple[str, list[str]]:
        found = request.inputs
        if not isinstance(found, Mapping) or "query" not in found or not found.keys() & {"texts", "documents"}:
            raise BadRequest('send {"query": "…", "texts": ["…", "…"]}')
        check_keys(found, ("query", "texts", "documents"))
        name = "texts" if "texts" in found else "documents"
        return read_text(only_of(found["query"]), "query"), read_texts(found[name], name)


def has_pairs(inputs: Any) -> bool:
    """Whether a request is a front end's for the scores of pairs."""
    return isinstance(inputs, Mapping) and "pairs" in inputs


def read_pairs(inputs: Mapping[str, Any]) -> list[tuple[str, str]]:
    check_keys(inputs, ("pairs",))
    if not isinstance(inputs["pairs"], list) or not inputs["pairs"]:
        raise BadRequest("pairs must be a list of lists of two texts")
    return [read_two(pair, i) for i, pair in enumerate(inputs["pairs"])]


def read_two(pair: Any, index: int) -> tuple[str, str]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise BadRequest(f"pairs[{index}] must be a list of two texts")
    return read_text(pair[0], f"pairs[{index}][0]"), read_text(pair[1], f"pairs[{index}][1]")


def num_tokens(encodings: Sequence[Any]) -> int:
    return sum(len(encoding["input_ids"]) for encoding in encodings)


class FillMask(TextTask):
    """The most probable tokens in the place of a mask."""

    auto_class = "AutoModelForMaskedLM"
    per_token = True
    known: ClassVar[Mapping[str, Kind]] = {"top_k": "count", "targets": "texts", "truncation": "flag"}

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        if self.tokenizer.mask_token_id is None:
            raise HandlerError(f"fill-mask needs a mask token, and the tokenizer of {runtime.folder.name} has none")

    def prepare(self, request: TaskRequest) -> list[Any]:
        encodings = []
        for item in request.items:
            encoding = self.encode(read_text(item), truncates=bool(request.parameters.get("truncation")))
            if self.tokenizer.mask_token_id not in encoding["input_ids"]:
                raise BadRequest(f"the text has no {self.tokenizer.mask_token}; put it where a word is to be found")
            encodings.append(encoding)
        self.targets(request)
        return encodings

    def reply(self, request: TaskRequest, inputs: Sequence[Any], outputs: Sequence[Array]) -> Any:
        replies = [self.fill(e["input_ids"], logits, request) for e, logits in zip(inputs, outputs, strict=True)]
        return replies if len(replies) > 1 else replies[0]

    def fill(self, ids: list[int], logits_TV: Array, request: TaskRequest) -> Any:
        """The proposals for one text; a list of lists if it has several masks."""
        places = [place for place, token in enumerate(ids) if token == self.tokenizer.mask_token_id]
        allowed = self.targets(request)
        rows = []
        for place in places:
            scores = softmax(logits_TV[place])
            candidates = np.asarray(allowed) if allowed is not None else np.arange(len(scores))
            best = candidates[np.argsort(-scores[candidates], kind="stable")][: request.parameters.get("top_k") or 5]
            rows.append([self.proposal(ids, place, int(token), scores, len(places) == 1) for token in best])
        return rows[0] if len(rows) == 1 else rows

    def proposal(self, ids: list[int], place: int, token: int, scores: Array, is_only: bool) -> dict[str, Any]:
        filled = [*ids[:place], token, *ids[place + 1 :]]
        filled = [other for other in filled if other != self.tokenizer.pad_token_id]
        return {
            "score": float(scores[token]),
            "token": token,
            "token_str": self.tokenizer.decode([token]),
            "sequence": self.tokenizer.decode(filled, skip_special_tokens=is_only),
        }

    def targets(self, request: TaskRequest) -> list[int] | None:
        """The tokens that the request allows; None for all."""
        words = request.parameters.get("targets")
        if words is None:
            return None
        found = []
        for word in words:
            ids = [self.tokenizer.get_vocab().get(word)]
            if ids == [None]:
                ids = self.tokenizer(word, add_special_tokens=False)["input_ids"]
            if len(ids) != 1 or ids[0] == self.tokenizer.unk_token_id:
                raise BadRequest(f"the target {word[:60]!r} is not one token of the model; name words that are")
            found.append(ids[0])
        return sorted(set(found))


def read_pair(item: Any) -> tuple[str, str | None]:
    """A text, or the two of `{"text": …, "text_pair": …}`."""
    if not isinstance(item, Mapping):
        return read_text(item), None
    check_keys(item, ("text", "text_pair"))
    pair = item.get("text_pair")
    return read_text(item.get("text"), "text"), None if pair is None else read_text(pair, "text_pair")


def default_function(config: Any) -> str:
    """How scores are computed from logits, by the model's `problem_type` and number of labels."""
    if config.problem_type == "regression":
        return "none"
    return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"


def rank_labels(scores: Array, label: Callable[[int], str]) -> list[dict[str, Any]]:
    order = np.argsort(-scores, kind="stable")
    return [{"label": label(int(i)), "score": float(scores[i])} for i in order]
