"""RequestField: a field of a request; those for sampling come from the engine's table, others are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flambeau.errors import InvalidField
from flambeau.frontend.openai.fields import (
    FLAG,
    MAX_INTEGER,
    OBJECT,
    TOKEN_IDS,
    FieldType,
    array,
    either,
    integer,
    mapping,
    number,
    text,
)
from flambeau.frontend.openai.other_servers import OTHER_FIELDS
from flambeau.llm.sampling_params import MAX_BIAS, SAMPLING_FIELDS, SamplingField

# OpenAI's API names one parameter differently, and `logprobs` has another form in each endpoint.
OPENAI_NAMES = {"include_stop": "include_stop_str_in_output"}
NOT_OFFERED = frozenset({"logprobs", "speculate"})


def _to_ids(value: Mapping[str, float], place: str) -> dict[int, float]:
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) < 11):
            raise InvalidField(place, f"{place}: its keys must be token ids, not {key[:40]!r}")
    return {int(key): bias for key, bias in value.items()}


# Where OpenAI's API accepts less than the engine does, or another form.
NARROWER: dict[str, FieldType] = {
    "temperature": number(0, 2),
    "top_k": integer(-1).then(lambda value, place: max(0, value)),  # -1: all, as in other servers
    "seed": integer(-(2**63), 2**63 - 1),
    "stop": either(text(1).then(lambda value, place: [value]), array(text(1), max_length=16)),
    "logit_bias": mapping(number(-MAX_BIAS, MAX_BIAS)).then(_to_ids),
}


OTHER_KINDS = {
    "flag": FLAG,
    "texts": array(text(1)),
    "token_ids": TOKEN_IDS,
    "biases": OBJECT,
    "structure": OBJECT,
}


def _sampling_type(known: SamplingField) -> FieldType:
    low, high = known.low or 0, known.high
    if known.name in NARROWER:
        found = NARROWER[known.name]
    elif known.kind == "integer":
        found = integer(int(low), min(MAX_INTEGER, MAX_INTEGER if high is None else int(high)))
    elif known.kind == "number":
        found = number(low, MAX_INTEGER if high is None else high, excludes_low=known.excludes_low)
    else:
        found = OTHER_KINDS[known.kind]
    return found.described(known.doc)


@dataclass(frozen=True, slots=True)
class RequestField:
    """A field of a request, and the sampling parameter that it sets."""

    type: FieldType
    parameter: str = ""
    is_required: bool = False
    is_listed: bool = True
    is_kept: bool = True  # else it is only checked


SAMPLING = {
    OPENAI_NAMES.get(name, name): RequestField(_sampling_type(known), name)
    for name, known in SAMPLING_FIELDS.items()
    if name not in NOT_OFFERED
}


OTHERS = {name: RequestField(one.type, is_listed=False, is_kept=False) for name, one in OTHER_FIELDS.items()}
