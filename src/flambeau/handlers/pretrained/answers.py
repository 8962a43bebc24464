"""Question answering: the span of a context that answers a question.

Shapes: T tokens of a window
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.loaders.pretrained import Runtime
from flambeau.handlers.onnx.npy import Array
from flambeau.handlers.pretrained.task import TextTask, softmax, to_array
from flambeau.handlers.pretrained.task_request import Kind, TaskRequest, check_keys, only_of, read_text

NEVER = -10000.0  # the logit of a token that no answer may begin or end with
WINDOW, STRIDE = 384, 128  # tokens


class QuestionAnswering(TextTask):
    """Long contexts are read in overlapping windows, all in the same batch."""

    auto_class = "AutoModelForQuestionAnswering"
    per_token = True
    known: ClassVar[Mapping[str, Kind]] = {
        "top_k": "count",
        "max_answer_len": "count",
        "max_seq_len": "count",
        "doc_stride": "count",
        "max_question_len": "count",
        "handle_impossible_answer": "flag",
        "align_to_words": "flag",
    }
    fields = ("question", "context")
    input_shapes: ClassVar[Mapping[str, list[int]]] = {"question": [1], "context": [1]}
    output_types: ClassVar[Mapping[str, str]] = {"score": "FP64", "start": "INT64", "end": "INT64", "answer": "BYTES"}

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        if not self.tokenizer.is_fast:
            raise HandlerError(f"question-answering needs a tokenizer.json, which {runtime.folder.name} lacks")

    def prepare(self, request: TaskRequest) -> list[Any]:
        return [window for number, item in enumerate(request.items) for window in self.windows(number, item, request)]

    def windows(self, number: int, item: Any, request: TaskRequest) -> list[Any]:
        """The tokens of a question with each part of its context."""
        if not isinstance(item, Mapping) or not {"question", "context"} <= item.keys():
            raise BadRequest('send {"inputs": {"question": "…", "context": "…"}}')
        check_keys(item, self.fields)
        question, context = (read_text(only_of(item[name]), name) for name in self.fields)
        width = min(request.parameters.get("max_seq_len") or WINDOW, self.limit)
        limit = request.parameters.get("max_question_len") or 64
        asked = len(self.tokenizer(question, add_special_tokens=False)["input_ids"])
        if asked > limit:
            raise BadRequest(f"the question has {asked} tokens, and the limit is {limit} (max_question_len)")
        if width <= asked + self.tokenizer.num_special_tokens_to_add(pair=True):
            raise BadRequest(f"max_seq_len is {width}: too few tokens for the question and a part of the context")
        left = width - asked - self.tokenizer.num_special_tokens_to_add(pair=True)
        stride = min(request.parameters.get("doc_stride") or min(STRIDE, width // 2), left - 1)
        found = self.tokenizer(
            question,
            context,
            truncation="only_second",
            max_length=width,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        names = [name for name in self.tokenizer.model_input_names if name in found]
        return [
            {
                **{name: found[name][i] for name in names},
                "number": number,
                "context": context,
                "offsets": found["offset_mapping"][i],
                "sides": found.sequence_ids(i),
                "words": found.encodings[i].word_ids,
            }
            for i in range(len(found["input_ids"]))
        ]

    def outputs(self, result: Any) -> list[Array]:
        return [to_array(result.start_logits), to_array(result.end_logits)]

    def reply(self, request: TaskRequest, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        replies = []
        for number in range(len(request.items)):
            spans = [(w, out) for w, out in zip(inputs, outputs, strict=True) if w["number"] == number]
            top_k = request.parameters.get("top_k") or 1
            answers = choose_answers(spans, self.tokenizer.cls_token_id, request.parameters)[:top_k]
            replies.append(answers if request.parameters.get("top_k") else answers[0])
        if not request.is_many:
            return replies[0]
        return replies


def choose_answers(
    spans: Sequence[tuple[Mapping[str, Any], Sequence[Array]]], cls_id: int | None, parameters: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The answers of all windows of one question, the best first; equal answers are joined."""
    top_k, longest = parameters.get("top_k") or 1, parameters.get("max_answer_len") or 15
    aligns = parameters.get("align_to_words", True) is not False
    no_answer, found = 1.0, dict[tuple[int, int], float]()
    for window, (start_logits_T, end_logits_T) in spans:
        is_cls = [token == cls_id for token in window["input_ids"]]
        is_context = [side == 1 for side in window["sides"]]
        allowed = np.array(is_context) | np.array(is_cls)
        start_T = softmax(np.where(allowed, start_logits_T, NEVER))
        end_T = softmax(np.where(allowed, end_logits_T, NEVER))
        if any(is_cls):
            cls = is_cls.index(True)
            no_answer = min(no_answer, float(start_T[cls] * end_T[cls]))
        start_T, end_T = start_T * is_context, end_T * is_context
        scores_TT = np.tril(np.triu(np.outer(start_T, end_T)), longest - 1)
        for place in np.argsort(-scores_TT, axis=None, kind="stable")[:top_k].tolist():
            first, last = divmod(place, len(start_T))
            if not (is_context[first] and is_context[last]):
                continue
            span = to_characters(window, first, last, aligns=aligns)
            found[span] = max(found.get(span, 0.0), float(scores_TT[first, last]))
    context = spans[0][0]["context"]
    answers = [
        {"score": score, "start": start, "end": end, "answer": context[start:end]}
        for (start, end), score in found.items()
    ]
    if parameters.get("handle_impossible_answer"):
        answers.append({"score": no_answer, "start": 0, "end": 0, "answer": ""})
    return sorted(answers, key=lambda answer: -answer["score"])


def to_characters(window: Mapping[str, Any], first: int, last: int, *, aligns: bool) -> tuple[int, int]:
    """The characters of the tokens from first to last; with `aligns`, of the whole words they are in."""
    offsets, words, sides = window["offsets"], window["words"], window["sides"]
    if aligns and words[first] is not None and words[last] is not None:
        own = [i for i, side in enumerate(sides) if side == 1]
        starts = [offsets[i][0] for i in own if words[i] == words[first]]
        ends = [offsets[i][1] for i in own if words[i] == words[last]]
        return min(starts), max(ends)
    return offsets[first][0], offsets[last][1]
