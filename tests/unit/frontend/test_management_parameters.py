from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flambeau.errors import BadRequest
from flambeau.frontend.http.api_descriptions import MANAGEMENT
from flambeau.frontend.management_parameters import (
    DESCRIBE,
    LIST,
    REGISTER,
    SCALE,
    CallParameter,
    given_in,
    read_parameters,
    registration_of,
)

TABLE = [*REGISTER, *SCALE, *DESCRIBE, *LIST]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
ODD = st.sampled_from(
    ["abc", "1e3", "2000000000", "-1", "0", "+7", " 5 ", "1_0", "0x10", "٣", "9" * 5000, "\0", "\ud800", "true", "TRUE"]
)


def named(name: str, table: tuple[CallParameter, ...] = REGISTER) -> CallParameter:
    return next(one for one in table if one.name == name)


def outcome(one: CallParameter, value: object) -> tuple[Any, str]:
    """The value that was read, or the reason why none was."""
    try:
        return one.read(value), ""
    except BadRequest as error:
        return None, str(error)


@given(one=st.sampled_from(TABLE), value=JSON | ODD)
def test_any_value_is_read_within_the_limits_or_rejected_by_name(one, value):
    read, reason = outcome(one, value)
    if reason:
        assert reason.startswith(one.name)
        assert len(reason) < 200
        return
    if value is None or (value == "" and not one.keeps_empty):
        assert read == one.default
    elif one.kind == "whole":
        assert type(read) is int
        assert one.low <= read <= one.high
    elif one.kind == "flag":
        assert type(read) is bool
    else:
        assert len(read) <= one.max_length
        assert one.is_location or "\0" not in read.encode().decode()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("batch_size", "abc", "batch_size is 'abc'; it must be a whole number from 1 to 65536"),
        ("batch_size", "1e3", "batch_size is '1e3'; it must be a whole number from 1 to 65536"),
        ("batch_size", -1, "batch_size is -1; it must be a whole number from 1 to 65536"),
        ("batch_size", True, "batch_size is true or false; it must be a whole number from 1 to 65536"),
        ("response_timeout", "-1", "response_timeout is '-1'; it must be a whole number from 1 to 2147483647"),
        ("initial_workers", "2000000000", "initial_workers is '2000000000'; it must be a whole number from 0 to 10000"),
        ("synchronous", "maybe", "synchronous is 'maybe'; it must be true or false"),
        ("model_name", ["a"], "model_name is a list; it must be text"),
        ("model_name", "n" * 5000, "model_name has 5000 characters; it may have 256"),
        ("handler", "a\0b.py", "handler is 'a\\x00b.py'; it may hold no control characters"),
    ],
)
def test_sentence_names_what_was_found_and_what_was_expected(name, value, reason):
    with pytest.raises(BadRequest) as error:
        named(name).read(value)
    assert str(error.value).startswith(reason)


def test_number_that_python_does_not_print_is_rejected():
    with pytest.raises(BadRequest, match="batch_size is a number of thousands of digits; it must be"):
        named("batch_size").read(10**5000)


def test_values_that_existing_clients_send_are_read():
    given_values = {"url": "", "batch_size": "4", "max_batch_delay": 20.0, "model_name": 5, "synchronous": "False"}
    registration = registration_of(read_parameters(REGISTER, given_values))
    assert (registration.url, registration.batch_size, registration.max_batch_delay_ms) == ("", 4, 20)
    assert (registration.model_name, registration.synchronous, registration.s3_sse_kms) == ("5", False, False)
    assert registration_of(read_parameters(REGISTER, {"batch_size": ""})).batch_size is None


def test_numbers_up_to_zero_are_absent_in_a_grpc_message():
    empty = {one.name: 0 if one.kind == "whole" else "" if one.kind == "text" else False for one in REGISTER}
    message = SimpleNamespace(**{**empty, "batch_size": -3, "initial_workers": 2, "url": "a.mar"})
    values = read_parameters(REGISTER, given_in(REGISTER, message))
    assert (values["batch_size"], values["initial_workers"], values["url"]) == (None, 2, "a.mar")
    assert (values["synchronous"], values["model_name"]) == (False, None)
    message.initial_workers = 2_000_000_000
    with pytest.raises(BadRequest, match="from 0 to 10000"):
        read_parameters(REGISTER, given_in(REGISTER, message))


def test_description_has_the_limits_of_the_table():
    register = next(operation for operation in MANAGEMENT if operation.id == "registerModel").document()
    schemas = {one["name"]: one["schema"] for one in register["parameters"]}
    assert schemas["batch_size"] == {"type": "integer", "minimum": 1, "maximum": 65536}
    assert schemas["runtime"]["enum"] == ["python", "python3", "LSP"]
    body = register["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"] == schemas


@pytest.mark.parametrize(
    ("table", "name", "value", "expected", "is_used"),
    [
        (REGISTER, "batch_size", "dd", None, False),
        (REGISTER, "batch_size", "-5", None, False),
        (REGISTER, "startup_timeout", "0", 0, True),
        (REGISTER, "initial_workers", "-1", -1, True),
        (REGISTER, "synchronous", "-1", False, False),
        (SCALE, "min_worker", "nan", 1, False),
        (SCALE, "min_worker", "-1", -1, True),
    ],
)
def test_lenient_reading_takes_what_existing_clients_send(table, name, value, expected, is_used, caplog):
    assert read_parameters(table, {name: value}, strict=False)[name] == expected
    assert (not caplog.records) is is_used  # what is not used is a warning


@pytest.mark.parametrize(("name", "value"), [("min_worker", "99999999"), ("model_version", "a\0b")])
def test_lenient_reading_keeps_the_limits(name, value):
    with pytest.raises(BadRequest, match=name):
        read_parameters(SCALE, {name: value}, strict=False)
