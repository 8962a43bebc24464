"""PairPrompt: the tokens of a query and a document, in the form that a model which ranks texts was trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from flambeau.archive.pretrained import read_tag
from flambeau.archive.ranking_forms import FORMS, RankingForm, form_of_card
from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.embedding.small_documents import read_json

PLACES = ("{query}", "{document}")
PROMPT_KEYS = ("prompt", "true_token", "false_token")
OVERRIDES = ("architectures", "classifier_from_token", "is_original_qwen3_reranker", "method")  # of vLLM's hf_overrides
PROBES = ("first probe", "other probe", "third probe")


class PairPrompt(Protocol):
    """Turns a query and a document into token ids."""

    takes_instruction: bool

    def encode(self, query: str, document: str, instruction: str | None) -> list[int]: ...


class FormPrompt:
    """One of the published forms, or a prompt of the settings."""

    def __init__(self, tokenizer: Any, form: RankingForm, instruction: str | None = None) -> None:
        self.tokenizer, self.form = tokenizer, form
        self.instruction = form.instruction if instruction is None else instruction
        self.takes_instruction = any("{instruction}" in part for part in form.parts)

    def encode(self, query: str, document: str, instruction: str | None) -> list[int]:
        asked = self.instruction if instruction is None else instruction
        line = self.form.instruction_line.replace("{instruction}", asked) if asked else ""
        values = {"{query}": query, "{document}": document, "{instruction}": line}
        ids: list[int] = []
        for part in self.form.parts:
            if part == "{begin}":
                ids += [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
            else:
                ids += self.tokenizer(fill(part, values), add_special_tokens=False)["input_ids"]
        return ids


class ChatPrompt:
    """A chat template with the roles of sentence-transformers: system (the instruction), query and document."""

    def __init__(self, tokenizer: Any, instruction: str | None, *, is_structured: bool) -> None:
        self.tokenizer, self.instruction, self.is_structured = tokenizer, instruction, is_structured
        try:
            base = self.render(*PROBES[:2], None)
            missing = [
                role
                for role, other in (("query", (PROBES[2], PROBES[1])), ("document", (PROBES[0], PROBES[2])))
                if self.render(*other, None) == base
            ]
        except Exception as error:  # a template may raise anything
            raise HandlerError(f"the chat template cannot show a query and a document: {error}") from error
        if missing:
            raise HandlerError(f"the chat template does not show messages of the role {' and '.join(missing)}")
        self.takes_instruction = self.render(*PROBES[:2], PROBES[2]) != self.render(*PROBES[:2], PROBES[0])

    def encode(self, query: str, document: str, instruction: str | None) -> list[int]:
        ids: list[int] = self.tokenizer(self.render(query, document, instruction), add_special_tokens=False)[
            "input_ids"
        ]
        return ids

    def render(self, query: str, document: str, instruction: str | None) -> str:
        asked = self.instruction if instruction is None else instruction
        texts = ([("system", asked)] if asked else []) + [("query", query), ("document", document)]
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if self.is_structured else text}
            for role, text in texts
        ]
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False)
        return text


class PlainPrompt:
    """A pair as the tokenizer joins two texts; the instruction stands before the query."""

    takes_instruction = True

    def __init__(self, tokenizer: Any, instruction: str | None) -> None:
        self.tokenizer, self.instruction = tokenizer, instruction

    def encode(self, query: str, document: str, instruction: str | None) -> list[int]:
        asked = self.instruction if instruction is None else instruction
        ids: list[int] = self.tokenizer(f"{asked or ''}{query}", document)["input_ids"]
        return ids


def encode_pair(
    prompt: PairPrompt, tokenizer: Any, pair: tuple[str, str], instruction: str | None, limit: int, *, truncates: bool
) -> list[int]:
    """The tokens of a pair; of one that is too long, the document is shortened if the request allows that."""
    query, document = pair
    ids = prompt.encode(query, document, instruction)
    if len(ids) > limit and not truncates:
        raise BadRequest(
            f"the query and the document have {len(ids)} tokens with the prompt, and the model takes {limit}; shorten "
            'them, or send "truncate_prompt_tokens": -1 (of predictions "parameters": {"truncation": true})'
        )
    while len(ids) > limit:
        found = tokenizer(document, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in found["offset_mapping"]]
        kept = len(ends) - (len(ids) - limit)
        if kept < 1:
            raise BadRequest(
                f"the query is too long: with the prompt alone it fills the model's {limit} tokens; shorten it"
            )
        document = document[: ends[kept - 1]]
        ids = prompt.encode(query, document, instruction)
    return ids


def check_pair(pair: Sequence[str], markers: Sequence[str]) -> None:
    """Reject texts with special tokens: they would end the prompt early, or the client has applied the template."""
    for text in pair:
        if found := next((marker for marker in markers if marker in text), None):
            raise BadRequest(
                f"a text holds {found}, a special token of the model. Send the plain query and documents: the server "
                "puts them into the model's prompt"
            )


def read_chat_prompt(folder: Path, tokenizer: Any) -> PairPrompt | None:
    """The chat template that the files of sentence-transformers name for pairs; None if they name none."""
    settings = read_json(folder / "sentence_bert_config.json")
    if given := settings.get("processing_kwargs"):
        raise HandlerError(f"sentence_bert_config.json has processing_kwargs ({given!r}), which are not supported")
    message = (settings.get("modality_config") or {}).get("message")
    if message is None:
        return None
    is_structured = message.get("format") == "structured"
    return ChatPrompt(tokenizer, read_default_prompt(folder) or None, is_structured=is_structured)


def read_default_prompt(folder: Path) -> str:
    """The prompt that sentence-transformers puts before every query; empty if there is none."""
    saved = read_json(folder / "config_sentence_transformers.json")
    if (name := saved.get("default_prompt_name")) is None:
        return ""
    prompts = saved.get("prompts") or {}
    if name not in prompts:
        raise HandlerError(f"config_sentence_transformers.json names the prompt {name!r}, which it does not have")
    return str(prompts[name])


def read_form(folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any]) -> RankingForm:
    """The form that the settings name (ours, or vLLM's hf_overrides), that config.json names, or the model card."""
    named = settings.get("ranking")
    overrides = settings.get("hf_overrides") or {}
    if unknown := sorted(overrides.keys() - {*OVERRIDES}):
        raise HandlerError(f"hf_overrides has {', '.join(unknown)}; of vLLM's it may hold {', '.join(OVERRIDES)}")
    if isinstance(named, Mapping):
        return form_of_settings(named)
    found = {key: config[key] for key in OVERRIDES if key in config} | overrides
    if named is None:
        named = "qwen3_reranker" if found.get("is_original_qwen3_reranker") else ""
        named = named or form_of_card(folder, config, read_tag(folder))
    if named not in FORMS:
        what = f"ranking: {named!r} is not known" if named else "its prompt is not known"
        raise HandlerError(
            f"{folder.name} is a language model that ranks texts, and {what}. Put `ranking: FORM` into the handler "
            f"section of its model-config.yaml, with one of {', '.join(FORMS)}, or "
            "`ranking: {prompt: …, true_token: …}`"
        )
    form = FORMS[named]
    if tokens := found.get("classifier_from_token"):
        if not isinstance(tokens, list) or len(tokens) not in (1, 2) or not all(isinstance(t, str) for t in tokens):
            raise HandlerError(f"classifier_from_token must be one text or two (the second means yes), not {tokens!r}")
        return replace(form, true_token=tokens[-1], false_token=tokens[0] if len(tokens) == 2 else None)
    return form


def form_of_settings(named: Mapping[str, Any]) -> RankingForm:
    prompt, true_token, false_token = (named.get(key) for key in PROMPT_KEYS)
    if unknown := sorted(map(str, named.keys() - {*PROMPT_KEYS})):
        raise HandlerError(f"ranking has {', '.join(unknown)}; it may hold {', '.join(PROMPT_KEYS)}")
    if not isinstance(prompt, str) or any(prompt.count(place) != 1 for place in PLACES):
        raise HandlerError(f"ranking: prompt must be a text with {' and '.join(PLACES)}, each once")
    if not isinstance(true_token, str) or not isinstance(false_token, (str, type(None))):
        raise HandlerError(
            "ranking: true_token (and false_token) must be the text of a token; quote yes and no in YAML"
        )
    return RankingForm(parts=(prompt,), true_token=true_token, false_token=false_token)


def token_id(tokenizer: Any, text: str) -> int:
    """The only token of a text."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise HandlerError(f"{text!r} is {len(ids)} tokens of this model, not one, so its probability is no score")
    return int(ids[0])


def fill(part: str, values: Mapping[str, str]) -> str:
    """The part with its places filled, in one pass: what fills one may look like another."""
    pieces, rest = "", part
    while found := min((place for place in values if place in rest), key=rest.index, default=None):
        before, _, rest = rest.partition(found)
        pieces += before + values[found]
    return pieces + rest
