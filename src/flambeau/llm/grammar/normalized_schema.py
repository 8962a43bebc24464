"""normalize: a checked JSON schema → one that llguidance enforces as the specification means it.

llguidance looks at groups of keywords that have no `allOf` and the like between them, takes dates and times by their
digits alone, reads numbers as floats, and patterns as Rust does.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from flambeau.llm.grammar.exact_numbers import LIMITS, MAX_LIMIT, Number, close_limits, is_number, limits_of
from flambeau.llm.grammar.patterns import to_rust
from flambeau.llm.grammar.schema import LISTS, MAPS, ONE, parts_of

TOGETHER = ("items", "additionalItems")
Limits = Set[Number]  # of all parts of a schema

YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"  # Python has no year 0000
LEAP = "(?:0[48]|[2468][048]|[13579][26])"
DATE = f"(?:{YEAR}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|(?:[0-9]{{2}}{LEAP}|{LEAP}00)-02-29)"
TIME = "[0-9]{2}:[0-9]{2}:[0-5]"  # a leap second is valid only at times that depend on the zone
ALNUM, INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"
# Without "--" at its third place, which announces an encoding that would have to be valid too.
LABEL = f"{ALNUM}(?:{ALNUM}|{INNER}{{1,2}}{ALNUM}|{INNER}(?:{ALNUM}{INNER}|-{ALNUM}){INNER}{{0,58}}{ALNUM})?"

# What a format asks for beyond llguidance's expression.
FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{DATE}"},
    "date-time": {"pattern": f"^{DATE}.*[tT]{TIME}"},
    "time": {"pattern": f"^{TIME}"},
    "hostname": {"pattern": rf"^{LABEL}(?:\.{LABEL})*$", "maxLength": 253},
    # Many validators ask for a point in the domain, and for more than a scheme in a URI.
    "email": {"pattern": r"^[^@]{1,64}@[^@\[.]{1,100}\.[^@\[]{1,154}$"},
    "uri": {"pattern": "^[^:]+:[^?#]"},
    "int32": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "int64": {"minimum": -MAX_LIMIT, "maximum": MAX_LIMIT},
}


def normalize(schema: Any) -> Any:
    parts = [part for _, part in parts_of(schema) if isinstance(part, dict)]
    limits = {value for part in parts for value in limits_of(part).values() if is_number(value)}
    return _normalize(schema, limits)


def _normalize(schema: Any, all_limits: Limits) -> Any:
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for word in schema:
        for each in TOGETHER if word in TOGETHER else (word,):
            if each in schema and each not in found:
                found[each] = _value(each, schema[each], all_limits)
    if limits := limits_of(schema):
        found = {word: value for word, value in found.items() if word not in LIMITS}
        found |= close_limits(limits, all_limits)
    if found.get("uniqueItems") is False:
        del found["uniqueItems"]
    extra = FORMATS.get(found["format"]) if isinstance(found.get("format"), str) else None
    if extra is not None and isinstance(found.get("allOf", []), list):
        found["allOf"] = [*found.get("allOf", ()), extra]
    return found


def _value(word: str, value: Any, all_limits: Limits) -> Any:
    if word in MAPS and isinstance(value, dict):
        named = {name: _normalize(part, all_limits) for name, part in value.items()}
        return {to_rust(name): part for name, part in named.items()} if word == "patternProperties" else named
    if word in LISTS and isinstance(value, list):
        return [_normalize(part, all_limits) for part in value]
    if word in ONE:
        return _normalize(value, all_limits)
    return to_rust(value) if word == "pattern" and isinstance(value, str) else value
