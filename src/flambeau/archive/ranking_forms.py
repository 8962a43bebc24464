"""The prompts of published language models that rank texts by one token's probability, and how to recognise them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.small_files import read_small

CARD_BYTES = 1 << 20
TAGS = ("text-ranking", "text-classification")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingForm:
    """Texts around a query and a document, and the tokens that stand for yes and no."""

    parts: tuple[str, ...]  # tokenized one by one, as the authors do; {query}, {document}, {instruction}, {begin}
    true_token: str
    false_token: str | None = None  # None: the score is the logit of the other one alone
    instruction: str | None = None  # the default; None: there is none unless a request has one
    instruction_line: str = "{instruction}"  # what replaces {instruction}, if there is one


FORMS: Mapping[str, RankingForm] = {
    "qwen3_reranker": RankingForm(
        parts=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
            "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        true_token="yes",
        false_token="no",
        instruction="Given a web search query, retrieve relevant passages that answer the query",
    ),
    "bge_reranker": RankingForm(
        parts=("{begin}", "A: {query}", "\n", "B: {document}", "\n", "{instruction}"),
        true_token="Yes",
        instruction="Given a query A and a passage B, determine whether the passage contains an answer to the query by "
        "providing a prediction of either 'Yes' or 'No'.",
    ),
    "mxbai_rerank": RankingForm(
        parts=(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\n",
            "{instruction}query: {query}",
            "\n",
            "document: {document}",
            "\n",
            "You are a search relevance expert who evaluates how well documents match search queries. For each "
            "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
            "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        true_token="1",
        false_token="0",
        instruction_line="instruction: {instruction}\n",
    ),
}
# The network's `model_type` and a text of the model card that only such a model has → the form.
CARDS = (
    ("qwen3", "Judge whether the Document meets the requirements", "qwen3_reranker"),
    ("gemma", "Given a query A and a passage B", "bge_reranker"),
    ("qwen2", "mxbai-rerank", "mxbai_rerank"),
)


def form_of_card(folder: Path, config: Mapping[str, Any], tag: str) -> str:
    """The form that the model card shows; empty if it shows none. `tag` is its `pipeline_tag`.

    A network with code of its own (`auto_map`) has another head, so it is none of these.
    """
    kinds = [one for one in CARDS if one[0] == config.get("model_type")]
    if not kinds or tag not in TAGS or "auto_map" in config:
        return ""
    try:
        card = read_small(folder / "README.md", CARD_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return next((form for _, phrase, form in kinds if phrase in card), "")
