"""Texts are normalized step by step."""

from __future__ import annotations

import pytest

from flambeau.handlers.text_normalization import (
    CONTRACTION_MAP,
    expand_contractions,
    remove_accents,
    remove_html_tags,
    remove_punctuation,
)


@pytest.mark.parametrize(
    ("step", "text", "plain"),
    [
        (remove_html_tags, "a <b class='x>y'>c</b>&amp;&#39;&#x2f;&AMP; 1 < 2", "a y'>c&AMP; 1 < 2"),
        (remove_html_tags, "a <b\n> c", "a <b\n> c"),
        (expand_contractions, "It's Can't can't've 'cause rock'n'roll", "It is Cannot cannot have because rocknroll"),
        (expand_contractions, "I'd I'm we've he'll", "I would I am we have he will"),
        (remove_accents, "Café ﬁn 日本", "Cafe fin "),
        (remove_punctuation, "a.b, (c)! 5%", "ab c 5"),
    ],
)
def test_each_step_normalizes(step, text, plain):
    assert step(text) == plain


def test_contractions_are_lower_case_and_expand_to_words():
    assert CONTRACTION_MAP["won't"] == "will not"
    assert CONTRACTION_MAP["they're"] == "they are"
    assert CONTRACTION_MAP["where'd"] == "where did"
    for short, long in CONTRACTION_MAP.items():
        assert short == short.lower()
        assert "'" in short
        assert "'" not in long
