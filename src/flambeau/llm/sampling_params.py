"""SamplingParams and the table of its fields. Every API reads its sampling parameters from this table.

A new parameter is one line in `SamplingParams`; request readers, API schemas and the wire message follow from it.
This module loads no torch, so that the server process can import it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from flambeau.llm.errors import InvalidRequest as InvalidRequest  # front ends import this module only

SamplingKind = Literal["integer", "number", "flag", "texts", "token_ids", "biases", "structure"]

# The engine looks at all of these for every token, while the other sequences wait for their next step.
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1000
MAX_STOP_IDS = 1000
MAX_BAD_WORDS = 1000
MAX_ALLOWED_IDS = 200_000
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_SHOWN = 100  # characters of an invalid value in its error message
MAX_STRUCTURE = 128 * 1024  # characters of a schema or grammar
MAX_CHOICES = 1000  # texts among which the model chooses

# vLLM's older names of `structured_outputs`, one field for each form.
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
STRUCTURE_FIELDS = ("response_format", *GUIDED, "structured_outputs")
STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingField:
    """One sampling parameter: its names, its type and limits, and what it does."""

    name: str = ""
    kind: SamplingKind
    default: Any  # None: the parameter may be left out
    doc: str
    low: float | None = None
    high: float | None = None
    excludes_low: bool = False
    least: int = 0  # items of a list
    most: int | None = None  # items of a list; None: as many as of stops
    expects: str = ""  # the limits in words, where the default wording is not enough
    aliases: tuple[str, ...] = ()  # other names of it in prediction requests
    config_key: str = ""  # the key in model-config.yaml that sets the default of a model

    @property
    def limits(self) -> str:
        """The accepted values in words."""
        if self.expects:
            return self.expects
        noun = "a whole number" if self.kind == "integer" else "a number"
        if self.excludes_low:
            return f"{noun} above {self.low:g}, up to {self.high:g}"
        return f"{noun} from {self.low:g}" + ("" if self.high is None else f" to {self.high:g}")

    def violation(self, value: Any) -> str | None:
        """What a value must be, if it is not; None for a valid value."""
        return _CHECKS[self.kind](self, value)


def sampling_field(default: Any, kind: SamplingKind, doc: str, **options: Any) -> Any:
    """A dataclass field that carries its SamplingField."""
    metadata = {"sampling": SamplingField(kind=kind, default=default, doc=doc, **options)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Raises InvalidRequest, with the name of the field, for an invalid value."""

    max_tokens: int | None = sampling_field(
        None,
        "integer",
        "The most tokens to generate. Without it, until the model stops or the context is full.",
        low=1,
        aliases=("max_new_tokens",),
        config_key="max_new_tokens",
    )
    min_tokens: int = sampling_field(
        0, "integer", "Tokens to generate before a stop counts.", low=0, aliases=("min_new_tokens",)
    )
    temperature: float = sampling_field(
        1.0, "number", "Higher is more random; 0 is greedy.", low=0, high=100, config_key="temperature"
    )
    top_k: int = sampling_field(
        0,
        "integer",
        "Sample among this many of the likeliest tokens; 0: all.",
        low=0,
        expects="a whole number from 0 (0: all)",
        config_key="top_k",
    )
    top_p: float = sampling_field(
        1.0,
        "number",
        "Sample among the likeliest tokens that together have this probability.",
        low=0,
        high=1,
        excludes_low=True,
        config_key="top_p",
    )
    min_p: float = sampling_field(
        0.0,
        "number",
        "Sample among tokens that have at least this share of the likeliest token's probability.",
        low=0,
        high=1,
        config_key="min_p",
    )
    repetition_penalty: float = sampling_field(
        1.0,
        "number",
        "Above 1, tokens of the prompt and the text become less likely.",
        low=0.01,
        high=100,
        config_key="repetition_penalty",
    )
    presence_penalty: float = sampling_field(
        0.0, "number", "Above 0, tokens of the text become less likely, however often they occur.", low=-2, high=2
    )
    frequency_penalty: float = sampling_field(
        0.0, "number", "Above 0, tokens of the text become less likely each time they occur.", low=-2, high=2
    )
    logit_bias: Mapping[int, float] = sampling_field(
        {}, "biases", f"Token ids and what is added to their logits, from {-MAX_BIAS:g} to {MAX_BIAS:g}."
    )
    typical_p: float = sampling_field(
        1.0,
        "number",
        "Sample among the tokens nearest to the expected surprise that together have this probability; 1: all.",
        low=0,
        high=1,
        excludes_low=True,
        config_key="typical_p",
    )
    top_n_sigma: float = sampling_field(
        0.0,
        "number",
        "Sample among tokens whose logits are within this many standard deviations of the best; 0 or less: all.",
        low=-1,
        high=1000,
    )
    xtc_probability: float = sampling_field(
        0.0,
        "number",
        "How often all but the least likely of the tokens above xtc_threshold are left out; needs a temperature.",
        low=0,
        high=1,
    )
    xtc_threshold: float = sampling_field(
        0.1, "number", "The probability from which xtc_probability leaves tokens out.", low=0, high=1
    )
    dry_multiplier: float = sampling_field(
        0.0, "number", "Above 0, tokens that would continue a repetition become less likely.", low=0, high=100
    )
    dry_base: float = sampling_field(
        1.75, "number", "How many times more for each further token that is repeated already.", low=1, high=100
    )
    dry_allowed_length: int = sampling_field(2, "integer", "Repetitions of fewer tokens are not penalized.", low=1)
    dry_penalty_last_n: int = sampling_field(
        -1, "integer", "Look for repetitions in so many of the last tokens; -1: in prompt and text.", low=-1
    )
    dry_sequence_breakers: Sequence[str] = sampling_field(
        ("\n", ":", '"', "*"), "texts", "A repetition ends at tokens with one of these texts."
    )
    bad_words: Sequence[str] = sampling_field(
        (),
        "texts",
        "Texts whose tokens may not follow each other in the text, with and without a space before them.",
        most=MAX_BAD_WORDS,
    )
    allowed_token_ids: Sequence[int] | None = sampling_field(
        None,
        "token_ids",
        "The only tokens that may be generated; without the model's end token the text goes on to max_tokens.",
        least=1,
        most=MAX_ALLOWED_IDS,
    )
    no_repeat_ngram_size: int = sampling_field(
        0,
        "integer",
        "No sequence of this many tokens occurs twice in prompt and text; 0: they may repeat.",
        low=0,
        config_key="no_repeat_ngram_size",
    )
    seed: int | None = sampling_field(
        None,
        "integer",
        "The same seed gives the same text, as far as the hardware allows.",
        low=-(2**63),
        high=2**64 - 1,
        expects="a 64-bit number",
    )
    stop: Sequence[str] = sampling_field((), "texts", "Texts that end the generation.")
    stop_token_ids: Sequence[int] = sampling_field((), "token_ids", "Tokens that end the generation.")
    include_stop: bool = sampling_field(False, "flag", "Keep the stop text that ended the generation.")
    ignore_eos: bool = sampling_field(False, "flag", "Continue after the model's end-of-sequence token.")
    n: int = sampling_field(1, "integer", "How many texts to generate for a prompt.", low=1, high=128)
    logprobs: int | None = sampling_field(
        None, "integer", "Log-probabilities of the tokens, and of this many alternatives.", low=0, high=20
    )
    prompt_logprobs: int | None = sampling_field(
        None,
        "integer",
        "Log-probabilities of the prompt's tokens, and of this many alternatives; not in a stream.",
        low=0,
        high=20,
    )
    skip_special_tokens: bool = sampling_field(True, "flag", "Leave the names of special tokens out of the text.")
    speculate: bool = sampling_field(True, "flag", "Use speculative decoding where the engine has it.")
    structured_outputs: Mapping[str, Any] | None = sampling_field(
        None, "structure", f"The form that the text must have: one of {', '.join(STRUCTURES)}."
    )

    def __post_init__(self) -> None:
        for rule in SAMPLING_FIELDS.values():
            value = getattr(self, rule.name)
            if value is not rule.default and (expected := rule.violation(value)):
                raise invalid(rule.name, expected, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        if self.xtc_probability and self.is_greedy:
            raise invalid(
                "xtc_probability", "0 with temperature 0, which always takes the best token", self.xtc_probability
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def invalid(name: str, expected: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {expected}, not {repr(value)[:MAX_SHOWN]}", name)


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_between(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _check_number(rule: SamplingField, value: Any) -> str | None:
    is_right_type = is_int(value) or (rule.kind == "number" and isinstance(value, float))
    low, high = rule.low, rule.high
    is_valid = (
        is_right_type
        and (low is None or (value > low if rule.excludes_low else value >= low))
        and (high is None or value <= high)
    )
    return None if is_valid else rule.limits


def _check_texts(rule: SamplingField, value: Any) -> str | None:
    if not all(isinstance(text, str) and text for text in value):
        return "texts that are not empty"
    if len(value) > (most := rule.most or MAX_STOPS):
        return f"at most {most} texts"
    if any(len(text) > MAX_STOP_CHARACTERS for text in value):
        return f"texts of at most {MAX_STOP_CHARACTERS} characters"
    return None


def _check_token_ids(rule: SamplingField, value: Any) -> str | None:
    if not {*map(type, value)} <= {int}:
        return "token ids"
    if len(value) < rule.least:
        return f"at least {rule.least} token id"
    return f"at most {most} token ids" if len(value) > (most := rule.most or MAX_STOP_IDS) else None


def _check_biases(rule: SamplingField, value: Any) -> str | None:
    if not all(is_int(token) and is_between(bias, -MAX_BIAS, MAX_BIAS) for token, bias in value.items()):
        return f"token ids with numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}"
    return f"at most {MAX_BIASES} token ids" if len(value) > MAX_BIASES else None


def _check_structure(rule: SamplingField, value: Any) -> str | None:
    forms = [name for name in STRUCTURES if value.get(name) is not None]
    unknown = value.keys() - {*STRUCTURES, "disable_any_whitespace"}
    if len(forms) != 1 or unknown:
        return f"an object with one of {', '.join(STRUCTURES)}"
    [form], content = forms, value[forms[0]]
    if form == "json" and not isinstance(content, str | dict | bool):
        return "an object whose json is a schema"
    if form == "json_object" and content is not True:
        return "an object whose json_object is true"
    if form == "choice":
        texts = isinstance(content, list | tuple) and all(isinstance(text, str) and text for text in content)
        return (
            None if texts and 0 < len(content) <= MAX_CHOICES else f"an object whose choice is 1 to {MAX_CHOICES} texts"
        )
    if form in ("regex", "grammar") and not (isinstance(content, str) and content):
        return f"an object whose {form} is a text that is not empty"
    if isinstance(content, str) and len(content) > MAX_STRUCTURE:
        return f"an object whose {form} is a text of at most {MAX_STRUCTURE} characters"
    return None


_CHECKS = {
    "integer": _check_number,
    "number": _check_number,
    "flag": lambda rule, value: None,  # any truth value works
    "texts": _check_texts,
    "token_ids": _check_token_ids,
    "biases": _check_biases,
    "structure": _check_structure,
}


SAMPLING_FIELDS: dict[str, SamplingField] = {
    one.name: replace(one.metadata["sampling"], name=one.name) for one in fields(SamplingParams)
}


# ---- other spellings of structured_outputs ----


def read_structure(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `structured_outputs` of a request, by whichever of STRUCTURE_FIELDS it has; None: free text.

    A schema becomes JSON text, so that its order and its numbers stay as they are on the way to the engine.
    """
    given = {name: fields[name] for name in STRUCTURE_FIELDS if fields.get(name) is not None}
    if (form := given.get("response_format")) is not None and _is_plain_text(form):
        del given["response_format"]
    if not given:
        return None
    if len(given) > 1:
        first, second, *_ = given
        raise InvalidRequest(f"{second} and {first} both say what form the text has; send one of them", second)
    [(name, value)] = given.items()
    if name == "response_format":
        structure = _read_response_format(value)
    elif name in GUIDED:
        structure = {GUIDED[name]: value}
    elif isinstance(value, Mapping):
        structure = dict(value)
    else:
        raise invalid(name, f"an object with one of {', '.join(STRUCTURES)}", value)
    if expected := _check_structure(SAMPLING_FIELDS["structured_outputs"], structure):
        form = GUIDED.get(name, "")  # a field whose value is the form itself
        raise invalid(name, expected.removeprefix(f"an object whose {form} is "), value)
    if isinstance(schema := structure.get("json"), dict | bool):
        structure["json"] = text = json.dumps(schema, ensure_ascii=False)
        if len(text) > MAX_STRUCTURE:
            raise invalid(name, f"a schema of at most {MAX_STRUCTURE} characters", text)
    return structure


def _is_plain_text(response_format: Any) -> bool:
    return isinstance(response_format, Mapping) and response_format.get("type") == "text"


def _check_names(value: Mapping[str, Any], place: str, known: Collection[str]) -> None:
    if (name := next((name for name in value if name not in known), None)) is not None:
        where = f"{place}.{str(name)[:MAX_SHOWN]}"
        raise InvalidRequest(f"unknown field {where}; {place} may have {', '.join(known)}", "response_format")


def _read_response_format(value: Any) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "json_object":
        if "schema" in value:
            raise InvalidRequest(
                "response_format: json_object has no schema; send the type json_schema, with json_schema.schema",
                "response_format",
            )
        _check_names(value, "response_format", ("type",))
        return {"json_object": True}
    if kind != "json_schema":
        raise InvalidRequest(
            f"response_format: its type must be text, json_object or json_schema, not {repr(kind)[:MAX_SHOWN]}",
            "response_format",
        )
    named = value.get("json_schema")
    if isinstance(named, Mapping) and "schema" in named:
        _check_names(value, "response_format", ("type", "json_schema"))
        _check_names(named, "response_format.json_schema", ("name", "description", "schema", "strict"))
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(
            "response_format.json_schema.schema is required: a JSON schema, as an object", "response_format"
        )
    return {"json": schema}
