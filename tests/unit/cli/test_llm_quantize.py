"""The text for the perplexity is read before anything is written."""

from __future__ import annotations

import pytest

from flambeau.cli.llm_quantize import quantize
from flambeau.errors import ConfigError


@pytest.mark.parametrize(("content", "reason"), [(None, "cannot be read: No such file"), ("  \n", "is empty")])
def test_unreadable_text_is_an_error_before_the_work(tmp_path, content, reason):
    text, into = tmp_path / "text", tmp_path / "into"
    if content is not None:
        text.write_text(content)
    with pytest.raises(ConfigError, match=reason):
        quantize(tmp_path, into, "int8", group_size=64, text=text)
    assert not into.exists()
