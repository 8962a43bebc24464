"""Field types of OpenAI's requests."""

from __future__ import annotations

import pytest

from flambeau.errors import InvalidField
from flambeau.frontend.openai.fields import (
    FLAG,
    OBJECT,
    TEXT,
    TOKEN_IDS,
    array,
    either,
    integer,
    mapping,
    number,
    one_of,
    refused,
    text,
)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (FLAG, True),
        (integer(1, 5), 5),
        (integer(), -(10**30)),
        (number(0, 2), 0),
        (number(0, 2), 1.5),
        (text(1), "a"),
        (one_of("a", "b"), "b"),
        (array(OBJECT), [{}, {"a": 1}]),
        (mapping(number(0, 1)), {"a": 1}),
        (either(TEXT, array(TEXT)), ["a"]),
        (TOKEN_IDS, [0, 2**31 - 1]),
        (TOKEN_IDS, []),
    ],
)
def test_valid_values_are_returned(kind, value):
    assert kind.check(value, "f") == value


@pytest.mark.parametrize(
    ("kind", "value", "place", "message"),
    [
        (FLAG, 1, "f", "f: expected true or false, got a whole number"),
        (integer(1, 5), True, "f", "f: expected a whole number, got true or false"),
        (integer(1, 5), 1.0, "f", "f: expected a whole number, got a number"),
        (integer(1, 5), 0, "f", "f: expected a whole number >= 1"),
        (integer(1, 5), 10**400, "f", "f: expected a whole number <= 5"),
        (number(0, 1, excludes_low=True), 0, "f", "f: expected a number > 0"),
        (number(0, 2), "1", "f", "f: expected a number, got text"),
        (text(1), "", "f", "f: expected text of length >= 1"),
        (text(1), None, "f", "f: expected text, got null"),
        (one_of("a", "b"), "c", "f", "f: expected a or b, not 'c'"),
        (array(OBJECT), [{}, []], "f[1]", "f[1]: expected object, got a list"),
        (array(TEXT, max_length=1), ["a", "b"], "f", "f: expected a list of length <= 1"),
        (mapping(number(0, 1)), {"a": 2}, "f[...]", "f[...]: expected a number <= 1"),
        (either(TEXT, array(TEXT)), 5, "f", "f: expected text or a list, got a whole number"),
        (either(TEXT, array(TEXT)), [5], "f[0]", "f[0]: expected text, got a whole number"),
        (TOKEN_IDS, [1, -1], "f[1]", "f[1]: expected a whole number >= 0"),
        (TOKEN_IDS, [1, True], "f[1]", "f[1]: expected a whole number, got true or false"),
        (refused("send b"), 1, "f", "f is not supported; send b"),
    ],
)
def test_an_invalid_value_is_named_with_its_place(kind, value, place, message):
    with pytest.raises(InvalidField) as found:
        kind.check(value, "f")
    assert (found.value.field, str(found.value)) == (place, message)


def test_a_further_step_runs_after_the_checks():
    kind = integer(-1, 5).then(lambda value, place: max(0, value))
    assert (kind.check(-1, "f"), kind.check(3, "f")) == (0, 3)
    with pytest.raises(InvalidField):
        kind.check(6, "f")


def test_schemas_hold_types_limits_and_descriptions():
    assert number(0, 1, excludes_low=True).described("A share.").schema == {
        "type": "number",
        "minimum": 0,
        "maximum": 1,
        "exclusiveMinimum": True,
        "description": "A share.",
    }
    assert array(text(1), max_length=4).schema == {
        "type": "array",
        "items": {"type": "string", "minLength": 1},
        "maxItems": 4,
    }
