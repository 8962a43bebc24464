"""Checks of a JSON schema before it becomes a grammar, and the JSON pointer of a part that cannot.

llguidance rejects the keywords of the specification that it does not enforce. It ignores all other words, as the
specification asks; here they are rejected too, except annotations, since a misspelled limit would not hold. Also
rejected is what llguidance accepts and does not hold in all texts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from flambeau.llm.errors import InvalidRequest
from flambeau.llm.grammar.exact_numbers import MAX_EXACT, NUM_DIGITS, is_exact, is_number
from flambeau.llm.grammar.patterns import to_rust

Schema = dict[str, Any]
Compile = Callable[[Any], str]  # a schema → why it cannot be compiled; empty: it can

MAX_DEPTH = 64
MAX_PARTS = 5000  # schemas within the schema
MAX_TRIALS = 200  # parts that are compiled by themselves to find the one at fault
MAX_MULTIPLE = 1000  # llguidance needs time and memory in proportion to its square


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ANNOTATIONS = words(
    """$schema $id $comment $anchor title description default examples example deprecated readOnly writeOnly
    contentMediaType contentEncoding contentSchema discriminator externalDocs xml"""
)
ONE = words(
    """additionalItems additionalProperties contains else if items not propertyNames then unevaluatedItems
    unevaluatedProperties"""
)
LISTS = words("allOf anyOf items oneOf prefixItems")
MAPS = words("$defs definitions dependencies dependentSchemas patternProperties properties")
OTHERS = words(
    """$ref $dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor $vocabulary const dependentRequired enum
    exclusiveMaximum exclusiveMinimum format id maxContains maxItems maxLength maxProperties maximum minContains
    minItems minLength minProperties minimum multipleOf pattern required type uniqueItems"""
)
KEYWORDS = ANNOTATIONS | ONE | LISTS | MAPS | OTHERS

DRAFTS = {"draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "draft/2019-09": 2019}
LATEST = 2020
# The first draft with a keyword, where that is not the first of all: llguidance would ignore it in earlier ones.
SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(words("dependentRequired dependentSchemas unevaluatedItems unevaluatedProperties"), 2019),
    **dict.fromkeys(words("minContains maxContains $recursiveRef"), 2019),
    **dict.fromkeys(("prefixItems", "$dynamicRef"), 2020),
}
NUMBER_FORMATS = words("int32 int64 float double")
STRING_FORMATS = words("date-time time date duration email hostname ipv4 ipv6 uuid uri")
CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # all that JSON writes as \\u…

# How llguidance's messages name the keyword at fault.
FAULTS = (
    (re.compile(r"^([^ ,]+)(?:, [^ ,]+)* cannot be enforced"), None),
    (re.compile("Unknown format"), "format"),
    (re.compile("Invalid type"), "type"),
    (re.compile("the parts of oneOf"), "oneOf"),
    (re.compile("regex parse error|regex"), "pattern"),
    (re.compile("Pointer .* does not exist|Resource "), "$ref"),
    (re.compile("enum must be"), "enum"),
    (re.compile(r"(?:Expected [^']*|Value) for '([^']+)'"), None),
    (re.compile("patternProperty"), "patternProperties"),
)


def parse_schema(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal("", f"the schema is no valid JSON: {error}") from None


def check_schema(schema: Any) -> None:
    """Reject what the compiler would ignore or not hold, and what would take it too long."""
    multiples = 1
    parts: dict[str, Any] = {}
    for pointer, part in parts_of(schema):
        if len(parts) > MAX_PARTS:
            raise refusal("", f"it has more than {MAX_PARTS} parts; use a smaller one")
        parts[pointer] = part
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise refusal(pointer, f"a schema is an object, true or false, not {json.dumps(part)[:60]}")
        check_words(pointer, part)
        check_values(pointer, part)
        if isinstance(multiple := part.get("multipleOf"), int | float) and math.isfinite(multiple) and multiple:
            multiples = math.lcm(multiples, abs(Fraction(str(multiple)).numerator))
            if multiples > MAX_MULTIPLE:
                raise refusal(
                    join(pointer, "multipleOf"),
                    f"multiples of {multiple} would take too much time; the least common multiple of all may be at "
                    f"most {MAX_MULTIPLE}",
                )
    check_drafts(schema)
    check_references(parts)


def check_words(pointer: str, part: Schema) -> None:
    for word in part:
        if word not in KEYWORDS and (not word.startswith("x-") or word == "x-guidance"):
            remedy = 'add "null" to its type' if word == "nullable" else "leave it out"
            raise refusal(join(pointer, word), f"{word[:60]} is no keyword that can be enforced; {remedy}")
    if "prefixItems" in part and "additionalItems" in part:
        raise refusal(join(pointer, "additionalItems"), "it is no keyword beside prefixItems; use items")


def check_values(pointer: str, part: Schema) -> None:
    for word in ("const", "enum"):
        if word in part and (reason := inexact(part[word])):
            raise refusal(join(pointer, word), reason)
    names = part.get("patternProperties")
    texts = [part["pattern"]] if isinstance(part.get("pattern"), str) else []
    for word, patterns in (("pattern", texts), ("patternProperties", [*names] if isinstance(names, dict) else [])):
        try:
            found = {to_rust(pattern) for pattern in patterns}
        except ValueError as error:
            raise refusal(join(pointer, word), str(error)) from None
        if len(found) < len(patterns):
            raise refusal(join(pointer, word), "two of its patterns match the same names")
    check_format(pointer, part)
    check_least_properties(pointer, part)


def inexact(value: Any) -> str:
    """Why a value cannot be enforced to the letter; empty: it can."""
    if is_number(value) and not is_exact(value):
        return (
            f"numbers with more than {NUM_DIGITS} digits, and integers beyond {MAX_EXACT}, are not exact; use a string"
        )
    if isinstance(value, str) and CONTROL.search(value):
        return "it has a control character, which cannot be written"
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return next((reason for each in inner if (reason := inexact(each))), "")


def check_format(pointer: str, part: Schema) -> None:
    """llguidance looks at formats of texts only, and knows one that allows any text."""
    name, types = part.get("format"), types_of(part)
    if not isinstance(name, str):
        return
    is_number = types is not None and types <= {"integer", "number"}
    if name in STRING_FORMATS or (is_number and name in NUMBER_FORMATS):
        return
    remedy = "use minimum and maximum" if is_number else "leave it out"
    raise refusal(join(pointer, "format"), f"Unknown format: {name[:60]}; {remedy}")


def check_least_properties(pointer: str, part: Schema) -> None:
    """A grammar cannot tell whether a name that it does not know has been written before."""
    least, types, required = part.get("minProperties"), types_of(part), part.get("required")
    if not isinstance(least, int) or (types is not None and "object" not in types):
        return
    num_required = len({*map(str, required)}) if isinstance(required, list) else 0
    is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
    if least > num_required + 1 and not is_closed:
        raise refusal(
            join(pointer, "minProperties"),
            "a name may be written twice and counts once; name the properties in required, or set "
            "additionalProperties to false",
        )


def types_of(part: Mapping[str, Any]) -> set[str] | None:
    """None: all."""
    found = part.get("type")
    return {found} if isinstance(found, str) else {*map(str, found)} if isinstance(found, list) else None


def check_drafts(schema: Any) -> None:
    """Reject keywords that the declared draft does not have."""
    drafts: dict[str, int] = {}
    for pointer, part in parts_of(schema):
        outer = next((drafts[place] for place in enclosing(pointer) if place in drafts), LATEST)
        if isinstance(part, dict):
            draft = drafts[pointer] = draft_of(part.get("$schema"), outer)
            if (word := next((word for word in part if SINCE.get(word, 0) > draft), None)) is not None:
                raise refusal(join(pointer, word), f"the draft that $schema names has no {word}; use a later one")


def draft_of(uri: Any, otherwise: int) -> int:
    if not isinstance(uri, str):
        return otherwise
    return next((number for name, number in DRAFTS.items() if f"json-schema.org/{name}/" in uri), LATEST)


def enclosing(pointer: str) -> Iterator[str]:
    while pointer:
        pointer = pointer.rpartition("/")[0]
        yield pointer


def check_references(parts: dict[str, Any]) -> None:
    """A reference names a part that was checked, and no example or extension."""
    bases = [
        "",
        *(pointer for pointer, part in parts.items() if isinstance(part, dict) and {"$id", "id"} & part.keys()),
    ]
    for pointer, part in parts.items():
        target = part.get("$ref") if isinstance(part, dict) else None
        fragment = unquote(target.partition("#")[2]) if isinstance(target, str) else ""
        if fragment.rstrip("/").startswith("/") and not any(base + fragment in parts for base in bases):
            raise refusal(join(pointer, "$ref"), "it does not name a schema within the schema")


def parts_of(schema: Any, pointer: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """A schema and all schemas within it, with their JSON pointers."""
    yield pointer, schema
    if depth > MAX_DEPTH:
        raise refusal(pointer, f"it is nested more than {MAX_DEPTH} deep; use $defs, or a flatter schema")
    if not isinstance(schema, dict):
        return
    for word, value in schema.items():
        place = join(pointer, word)
        if word in MAPS and isinstance(value, dict):
            for name, part in value.items():
                if word != "dependencies" or not isinstance(part, list):
                    yield from parts_of(part, join(place, name), depth + 1)
        elif word in LISTS and isinstance(value, list):
            for i, part in enumerate(value):
                yield from parts_of(part, join(place, str(i)), depth + 1)
        elif word in ONE:
            yield from parts_of(value, place, depth + 1)


def locate_fault(schema: Schema, message: str, compile_: Compile) -> str:
    """The pointer of the innermost part that by itself is rejected with the same message."""
    found, culprit = "", schema
    shared = {word: schema[word] for word in ("$schema", "$defs", "definitions") if word in schema}
    for number, (pointer, part) in enumerate(parts_of(schema)):
        if number > MAX_TRIALS:
            break
        if number and isinstance(part, dict) and pointer.startswith(found) and compile_({**shared, **part}) == message:
            found, culprit = pointer, part
    if (match := re.search("required property '(.+)' is unsatisfiable", message)) is not None:
        named = isinstance(culprit.get("properties"), dict) and match[1] in culprit["properties"]
        return join(join(found, "properties"), match[1]) if named else join(found, "required")
    for pattern, word in FAULTS:
        if (match := pattern.search(message)) is not None:
            keyword = match[1] if word is None else word
            return join(found, keyword) if keyword in culprit else found
    return found


def join(pointer: str, word: str) -> str:
    return f"{pointer}/{word.replace('~', '~0').replace('/', '~1')}"


def refusal(pointer: str, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"the JSON schema cannot be enforced at {pointer or 'its root'!s}: {reason}", "structured_outputs"
    )
