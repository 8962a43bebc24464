"""Checks of a JSON schema before it becomes a grammar, and the JSON pointer of a part that cannot.

llguidance rejects the keywords of the specification that it does not enforce. It ignores all other words, as the
specification asks; here they are rejected too, except annotations, since a misspelled limit would not hold.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from flambeau.llm.errors import InvalidRequest

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

# How llguidance's messages name the keyword at fault.
FAULTS = (
    (re.compile(r'Unimplemented keys: \["([^"]+)"'), None),
    (re.compile("Unknown format"), "format"),
    (re.compile("Invalid type"), "type"),
    (re.compile("the parts of oneOf"), "oneOf"),
    (re.compile("regex parse error|regex"), "pattern"),
    (re.compile("Pointer .* does not exist|Resource "), "$ref"),
    (re.compile("enum must be"), "enum"),
)


def parse_schema(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal("", f"the schema is no valid JSON: {error}") from None


def check_schema(schema: Any) -> None:
    """Reject what the compiler would ignore, and what would take it too long."""
    multiples = 1
    for number, (pointer, part) in enumerate(parts_of(schema)):
        if number > MAX_PARTS:
            raise refusal("", f"it has more than {MAX_PARTS} parts; use a smaller one")
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise refusal(pointer, f"a schema is an object, true or false, not {json.dumps(part)[:60]}")
        for word in part:
            if word not in KEYWORDS and (not word.startswith("x-") or word == "x-guidance"):
                remedy = 'add "null" to its type' if word == "nullable" else "leave it out"
                raise refusal(join(pointer, word), f"{word[:60]} is no keyword that can be enforced; {remedy}")
        if isinstance(multiple := part.get("multipleOf"), int | float) and math.isfinite(multiple) and multiple:
            multiples = math.lcm(multiples, abs(Fraction(str(multiple)).numerator))
            if multiples > MAX_MULTIPLE:
                raise refusal(
                    join(pointer, "multipleOf"),
                    f"multiples of {multiple} would take too much time; the least common multiple of all may be at "
                    f"most {MAX_MULTIPLE}",
                )


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
