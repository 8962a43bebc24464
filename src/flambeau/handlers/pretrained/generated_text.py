"""Summarization, translation and other tasks that turn a text into another one with an encoder and a decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from flambeau.errors import BadRequest
from flambeau.handlers.embedding.handler import plan_groups
from flambeau.handlers.loaders.pretrained import Runtime
from flambeau.handlers.pretrained.task import Task, token_limit
from flambeau.handlers.pretrained.task_request import Kind, TaskRequest, read_text

DEFAULT_NEW_TOKENS = 256
MAX_BEAMS = 16
GENERATION: Mapping[str, Kind] = {
    "max_new_tokens": "count",
    "min_new_tokens": "some",
    "max_length": "count",
    "min_length": "some",
    "num_beams": "count",
    "do_sample": "flag",
    "temperature": "number",
    "top_k": "count",
    "top_p": "number",
    "repetition_penalty": "number",
    "length_penalty": "number",
    "no_repeat_ngram_size": "some",
    "early_stopping": "flag",
}


class GeneratedText(Task):
    """Requests with the same settings are generated together."""

    known: ClassVar[Mapping[str, Kind]] = {
        **GENERATION,
        "truncation": "flag",
        "src_lang": "text",
        "tgt_lang": "text",
    }

    def __init__(self, runtime: Runtime, task: str) -> None:
        self.runtime, self.task = runtime, task
        self.key = {"summarization": "summary_text", "translation": "translation_text"}.get(task, "generated_text")
        self.tokenizer = runtime.load_part("AutoTokenizer")
        self.model = runtime.load_model("AutoModelForSeq2SeqLM", generates=True)
        self.limit = token_limit(self.model.config, self.tokenizer)
        config = json.loads((runtime.folder / "config.json").read_bytes())
        self.specific: Mapping[str, Any] = config.get("task_specific_params") or {}
        self.default_prefix: str = config.get("prefix") or ""

    def prepare(self, request: TaskRequest) -> list[Any]:
        settings, prefix = self.settings(request)
        truncates = bool(request.parameters.get("truncation"))
        return [self.encode(prefix + read_text(item), truncates=truncates) | settings for item in request.items]

    def encode(self, text: str, *, truncates: bool) -> dict[str, Any]:
        ids = self.tokenizer(text, truncation=truncates, max_length=self.limit if truncates else None)["input_ids"]
        if len(ids) > self.limit:
            raise BadRequest(
                f"the text has {len(ids)} tokens, and the model takes {self.limit}; shorten it, or send "
                '"parameters": {"truncation": true}'
            )
        return {"ids": ids}

    def settings(self, request: TaskRequest) -> tuple[dict[str, Any], str]:
        """The arguments of generate() as a key that equal requests share, and the text before each input."""
        given = {name: value for name, value in request.parameters.items() if name in GENERATION and value is not None}
        prefix, languages = self.default_prefix, self.languages(request)
        defaults = self.specific.get(self.task) or {}
        if isinstance(languages, str):  # a task of its own, such as translation_en_to_fr
            defaults = self.specific[languages]
            languages = {}
        prefix = defaults.get("prefix", prefix) if isinstance(defaults, Mapping) else prefix
        inherited = {name: value for name, value in defaults.items() if name in GENERATION}
        if "max_new_tokens" in given:
            inherited.pop("max_length", None)
        arguments = {**inherited, **languages, **check_generation(given, self.runtime.max_new_tokens)}
        return {
            "arguments": json.dumps(arguments, sort_keys=True),
            "src_lang": request.parameters.get("src_lang"),
        }, prefix

    def languages(self, request: TaskRequest) -> dict[str, Any] | str:
        """The arguments for `src_lang` and `tgt_lang`, or the name of the model's own task for them."""
        source, target = request.parameters.get("src_lang"), request.parameters.get("tgt_lang")
        if source is None and target is None:
            return {}
        own = f"translation_{source}_to_{target}"
        if own in self.specific:
            return own
        codes = self.language_codes()
        if not codes:
            known = ", ".join(name for name in self.specific if name.startswith("translation_")) or "none"
            raise BadRequest(f"the model translates without src_lang and tgt_lang; its own tasks: {known}")
        for name, code in (("src_lang", source), ("tgt_lang", target)):
            if code is not None and code not in codes:
                raise BadRequest(
                    f"{name} {code[:40]!r} is not a language of the model; it has {', '.join([*codes][:8])}, …"
                )
        return {} if target is None else {"forced_bos_token_id": codes[target]}

    def language_codes(self) -> dict[str, int]:
        """The tokens of the languages, by code; empty for a model of one pair of languages."""
        if not hasattr(type(self.tokenizer), "src_lang"):
            return {}
        by_code = getattr(self.tokenizer, "lang_code_to_id", None) or getattr(self.tokenizer, "lang_code_to_token", {})
        found = {}
        for code, token in by_code.items():
            found[code] = token if isinstance(token, int) else self.tokenizer.convert_tokens_to_ids(token)
        if not found:
            names = self.tokenizer.all_special_tokens
            found = {name: self.tokenizer.convert_tokens_to_ids(name) for name in names if "_" in name}
        return found

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        groups: dict[Any, list[int]] = {}
        for i, entry in enumerate(inputs):
            groups.setdefault((entry["arguments"], entry["src_lang"]), []).append(i)
        found: dict[int, str] = {}
        for (arguments, _), members in groups.items():
            lengths = [len(inputs[i]["ids"]) for i in members]
            for places in plan_groups(lengths, self.runtime.max_tokens):
                own = [members[place] for place in places]
                texts = self.generate([inputs[i]["ids"] for i in own], json.loads(arguments))
                found |= zip(own, texts, strict=True)
        return [found[i] for i in range(len(inputs))]

    def generate(self, rows: Sequence[Sequence[int]], arguments: Mapping[str, Any]) -> list[str]:
        width, fill = max(map(len, rows)), self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows]).to(self.runtime.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]).to(self.runtime.device)
        settings = with_limit(self.model.generation_config, arguments, self.runtime.max_new_tokens)
        with torch.inference_mode():
            tokens = self.model.generate(input_ids=ids, attention_mask=mask, **settings)
        texts: list[str] = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return texts

    def reply(self, request: TaskRequest, inputs: Sequence[Any], outputs: Sequence[str]) -> Any:
        return [{self.key: text} for text in outputs]

    def describe(self) -> dict[str, Any]:
        return {"maxNewTokens": self.runtime.max_new_tokens}


def check_generation(given: Mapping[str, Any], max_new_tokens: int) -> Mapping[str, Any]:
    """Reject settings that would take too long, or that generate() does not accept."""
    for name in ("max_new_tokens", "max_length"):
        if given.get(name, 1) > max_new_tokens:
            raise BadRequest(f"{name} is {given[name]}; the limit is {max_new_tokens} (max_new_tokens of the handler)")
    if given.get("num_beams", 1) > MAX_BEAMS:
        raise BadRequest(f"num_beams is {given['num_beams']}; the limit is {MAX_BEAMS}")
    for name in ("temperature", "top_p", "repetition_penalty"):
        if given.get(name, 1.0) <= 0 or (name == "top_p" and given.get(name, 1.0) > 1):
            raise BadRequest(f"{name} must be above 0{' and at most 1' if name == 'top_p' else ''}, not {given[name]}")
    low = max(given.get("min_new_tokens", 0), given.get("min_length", 0))
    high = given.get("max_new_tokens") or given.get("max_length") or max_new_tokens
    if low > high:
        raise BadRequest(f"the least number of tokens is {low}, which is above the largest, {high}")
    return given


def with_limit(config: Any, arguments: Mapping[str, Any], most: int) -> dict[str, Any]:
    """The arguments of generate(), with a limit of tokens if neither they nor the model have one."""
    has_own = config.max_new_tokens is not None or (config.max_length or 20) != 20  # 20: the library's default
    if has_own or arguments.keys() & {"max_new_tokens", "max_length"}:
        return dict(arguments)
    return {"max_new_tokens": min(DEFAULT_NEW_TOKENS, most), **arguments}
