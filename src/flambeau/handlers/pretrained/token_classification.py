"""Token classification: the entities of a text, token by token or grouped into words and spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from flambeau.errors import HandlerError
from flambeau.handlers.loaders.pretrained import Runtime
from flambeau.handlers.onnx.npy import Array
from flambeau.handlers.pretrained.task import TextTask, softmax
from flambeau.handlers.pretrained.task_request import Kind, TaskRequest, read_text

STRATEGIES = ("none", "simple", "first", "average", "max")
Entity = dict[str, Any]


class TokenClassification(TextTask):
    """The tokens of a text whose label is not ignored; an aggregation strategy joins them."""

    auto_class = "AutoModelForTokenClassification"
    per_token = True
    known: ClassVar[Mapping[str, Kind]] = {
        "aggregation_strategy": STRATEGIES,
        "ignore_labels": "texts",
        "truncation": "flag",
    }

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        if not self.tokenizer.is_fast:
            raise HandlerError(f"token-classification needs a tokenizer.json, which {runtime.folder.name} lacks")
        model = self.tokenizer.backend_tokenizer.model
        self.knows_words = bool(getattr(model, "continuing_subword_prefix", None))

    def prepare(self, request: TaskRequest) -> list[Any]:
        truncates = bool(request.parameters.get("truncation"))
        encodings = []
        for item in request.items:
            text = read_text(item)
            options: dict[str, Any] = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
            encodings.append({"text": text, **self.encode(text, truncates=truncates, **options)})
        return encodings

    def reply(self, request: TaskRequest, inputs: Sequence[Any], outputs: Sequence[Array]) -> Any:
        strategy = request.parameters.get("aggregation_strategy") or "none"
        ignored = request.parameters.get("ignore_labels")
        ignored = ["O"] if ignored is None else ignored
        replies = []
        for encoding, logits_TC in zip(inputs, outputs, strict=True):
            entities = self.aggregate(self.tokens(encoding, softmax(logits_TC)), strategy)
            replies.append([e for e in entities if e.get("entity", e.get("entity_group")) not in ignored])
        return replies if request.is_many else replies[0]

    def tokens(self, encoding: Mapping[str, Any], scores_TC: Array) -> list[Entity]:
        """The tokens of the text itself, with their scores and places."""
        text, found = encoding["text"], []
        for i, (token, (start, end)) in enumerate(zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)):
            if encoding["special_tokens_mask"][i]:
                continue
            word = self.tokenizer.convert_ids_to_tokens(token)
            if self.knows_words:
                continues = len(word) != end - start
            else:
                continues = start > 0 and " " not in text[start - 1 : start + 1]
            if token == self.tokenizer.unk_token_id:
                word, continues = text[start:end], False
            place = {"index": i, "word": word, "start": start, "end": end}
            found.append({"scores": scores_TC[i], "continues": continues, **place})
        return found

    def aggregate(self, tokens: Sequence[Entity], strategy: str) -> list[Entity]:
        if strategy in ("none", "simple"):
            entities = [self.entity(token["scores"], token) for token in tokens]
        else:
            words: list[list[Entity]] = []
            for token in tokens:
                if words and token["continues"]:
                    words[-1].append(token)
                else:
                    words.append([token])
            entities = [self.word(parts, strategy) for parts in words]
        return entities if strategy == "none" else self.group(entities)

    def entity(self, scores: Array, token: Entity) -> Entity:
        best = int(scores.argmax())
        keys = [key for key in ("index", "word", "start", "end") if key in token]
        return {"entity": self.label(best), "score": float(scores[best])} | {key: token[key] for key in keys}

    def word(self, parts: Sequence[Entity], strategy: str) -> Entity:
        """The tokens of one word as one entity."""
        if strategy == "average":
            scores = np.mean([part["scores"] for part in parts], axis=0)
        elif strategy == "max":
            scores = max(parts, key=lambda part: part["scores"].max())["scores"]
        else:
            scores = parts[0]["scores"]
        text = self.tokenizer.convert_tokens_to_string([part["word"] for part in parts])
        return self.entity(scores, {"word": text, "start": parts[0]["start"], "end": parts[-1]["end"]})

    def group(self, entities: Sequence[Entity]) -> list[Entity]:
        """Join neighbors of the same kind; a label B-… begins a new group."""
        groups: list[list[Entity]] = []
        for entity in entities:
            is_first, kind = split_label(entity["entity"])
            if groups and not is_first and kind == split_label(groups[-1][-1]["entity"])[1]:
                groups[-1].append(entity)
            else:
                groups.append([entity])
        return [
            {
                "entity_group": group[0]["entity"].split("-", 1)[-1],
                "score": float(np.mean([entity["score"] for entity in group])),
                "word": self.tokenizer.convert_tokens_to_string([entity["word"] for entity in group]),
                "start": group[0]["start"],
                "end": group[-1]["end"],
            }
            for group in groups
        ]


def split_label(label: str) -> tuple[bool, str]:
    """Whether a label begins an entity, and its kind: B-PER → (True, PER)."""
    if label.startswith(("B-", "I-")):
        return label[0] == "B", label[2:]
    return False, label
