from __future__ import annotations

import pytest

from flambeau.handlers.text.contractions import CONTRACTION_MAP
from flambeau.handlers.text.tokens import get_tokenizer, ngrams_iterator


def test_basic_english_parts_words_and_marks():
    tokenize = get_tokenizer("basic_english")
    assert tokenize('It\'s "fine"; (3.5)!<br />Ok?') == [
        *("it", "'", "s", "fine", "(", "3", ".", "5", ")", "!", "ok", "?"),
    ]


def test_other_tokenizers():
    assert get_tokenizer(None)("a  b") == ["a", "b"]
    assert get_tokenizer(list)("ab") == ["a", "b"]
    with pytest.raises(ValueError, match="spacy"):
        get_tokenizer("spacy")
    with pytest.raises(ValueError, match="'de'"):
        get_tokenizer("basic_english", "de")


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, ["a", "b", "c"]), (2, ["a", "b", "c", "a b", "b c"]), (4, ["a", "b", "c", "a b", "b c", "a b c"])],
)
def test_ngrams_come_shortest_first(count, expected):
    assert [*ngrams_iterator(["a", "b", "c"], count)] == expected


def test_contractions_are_lower_case_and_expand_to_words():
    assert CONTRACTION_MAP["won't"] == "will not"
    assert CONTRACTION_MAP["they're"] == "they are"
    assert CONTRACTION_MAP["where'd"] == "where did"
    for short, long in CONTRACTION_MAP.items():
        assert short == short.lower()
        assert "'" in short
        assert "'" not in long
