from __future__ import annotations

import pytest

from flambeau.errors import ConfigError
from flambeau.handlers.settings import handler_options, read_count, read_flag, read_number


@pytest.mark.parametrize("config", [None, {}, {"handler": None}, {"handler": "text"}])
def test_no_section_is_an_empty_one(config):
    assert handler_options(config) == {}


def test_values_are_read_or_defaulted():
    options = handler_options({"handler": {"topk": 2, "threshold": 1, "weights_only": False}})
    assert read_count(options, "topk", 5) == 2
    assert read_count({}, "topk", 5) == 5
    assert read_number(options, "threshold", 0.5) == 1
    assert read_flag(options, "weights_only", True) is False


@pytest.mark.parametrize(
    ("read", "value"), [(read_count, 0), (read_count, True), (read_count, 2.5), (read_number, "1"), (read_flag, 1)]
)
def test_wrong_values_are_named(read, value):
    with pytest.raises(ConfigError, match="handler: name must be"):
        read({"name": value}, "name", 1)
