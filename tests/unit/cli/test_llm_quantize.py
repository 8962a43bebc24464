"""The text for the perplexity is read before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from flambeau.cli.llm_quantize import kept_apart, quantize
from flambeau.errors import ConfigError


@pytest.mark.parametrize(("content", "reason"), [(None, "cannot be read: No such file"), ("  \n", "is empty")])
def test_unreadable_text_is_an_error_before_the_work(tmp_path, content, reason):
    text, into = tmp_path / "text", tmp_path / "into"
    if content is not None:
        text.write_text(content)
    with pytest.raises(ConfigError, match=reason):
        quantize(tmp_path, into, "int8", group_size=64, text=text)
    assert not into.exists()


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("int3", {}, "--kind may be int8, int4, fp8"),
        ("int4", {"form": "zip"}, "--format may be flambeau or compressed-tensors"),
        ("int8", {"calibrate": Path("text")}, "--calibrate is for --kind int4"),
        ("int4", {"calibrate": Path("/no/such/text")}, "--calibrate /no/such/text cannot be read"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, kind, options, reason):
    with pytest.raises(ConfigError, match=reason):
        quantize(tmp_path, tmp_path / "into", kind, group_size=64, text=None, **options)


def test_a_tenth_of_the_calibration_text_is_kept_apart():
    assert kept_apart("0123456789" * 2) == ("012345678901234567", "89")
