from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flambeau.errors import ConfigError
from flambeau.torchserve.java_properties import dump, parse


def test_javas_format_is_read():
    text = (
        "# a comment\n! another\n\na=1\nb : 2\nc 3\n  d=with\\\n    continuation\ne=\\u0041\\t\\=x\n"
        "f=$$MY_STORE$$/x\ng=\nkey\\ with\\:odd=v=w\nh=c:\\\\dir\ni=a\\\n\n"
    )
    assert parse(text, {"MY_STORE": "/models"}) == {
        "a": "1",
        "b": "2",
        "c": "3",
        "d": "withcontinuation",
        "e": "A\t=x",
        "f": "/models/x",
        "g": "",
        "key with:odd": "v=w",
        "h": "c:\\dir",
        "i": "a",
    }


def test_every_kind_of_line_end_counts():
    assert parse("a=1\r\nb=2\rc=3\nd=\\\r\n  4") == {"a": "1", "b": "2", "c": "3", "d": "4"}


def test_missing_variable_is_named():
    with pytest.raises(ConfigError, match="Invalid Environment Variable NOT_SET_ANYWHERE"):
        parse("a=$$NOT_SET_ANYWHERE$$", {})


@given(st.dictionaries(st.text(min_size=1), st.text().filter(lambda text: "$$" not in text)))
def test_written_properties_are_read_back(properties):
    text = dump(properties, "a comment")
    assert text.isascii()
    assert parse(text, {}) == properties


@pytest.mark.parametrize("text", ["a=\\u12", "a=\\uzzzz", "\\u=x", "a=b\\u004"])
def test_malformed_escape_is_an_error_as_in_java(text):
    with pytest.raises(ConfigError, match=r"Malformed \\uxxxx encoding"):
        parse(text)


@given(st.text())
def test_any_text_is_read_or_rejected(text):
    try:
        assert all(isinstance(value, str) for value in parse(text, {}).values())
    except ConfigError:
        pass
