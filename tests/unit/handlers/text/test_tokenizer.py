from __future__ import annotations

import pytest
import torch

from flambeau.errors import HandlerError
from flambeau.handlers.text.tokenizer import (
    get_tokenizer,
    index_of,
    load_vocabulary,
    ngrams_iterator,
    reference_index,
)


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


class Old:
    """A vocabulary as torchtext pickled it."""

    words = ("<unk>", "a")

    def __getitem__(self, token):
        if token not in self.words:
            raise RuntimeError(f"Token {token} not found and default index is not set")
        return self.words.index(token)


class WithLookup:
    def lookup(self, token):
        return {"a": 4}[token]


def test_dict_and_list_are_read(tmp_path):
    for saved in ({"a": 0, "b": 1}, ["a", "b"]):
        torch.save(saved, tmp_path / "v.pt")
        assert load_vocabulary(tmp_path / "v.pt") == {"a": 0, "b": 1}


def test_unknown_tokens_are_dropped_or_have_an_index():
    assert index_of({"a": 3}, "b") is None
    assert index_of({"a": 3, "<unk>": 0}, "b") == 0
    assert index_of({"a": 0, "<unk>": 5}, "a") == 0
    assert index_of(Old(), "b") == 0
    assert index_of(Old(), "a") == 1
    assert index_of(WithLookup(), "a") == 4
    assert index_of(WithLookup(), "b") is None


def test_pickled_objects_need_weights_only_false(tmp_path):
    torch.save(Old(), tmp_path / "v.pt")
    with pytest.raises(HandlerError, match="weights_only: false"):
        load_vocabulary(tmp_path / "v.pt")
    assert load_vocabulary(tmp_path / "v.pt", weights_only=False)["a"] == 1


def test_other_objects_are_rejected(tmp_path):
    torch.save(torch.zeros(2), tmp_path / "v.pt")
    with pytest.raises(HandlerError, match="Tensor"):
        load_vocabulary(tmp_path / "v.pt")


def test_reference_is_padding_or_unknown():
    assert reference_index({"<pad>": 7, "<unk>": 2}) == 7
    assert reference_index({"<unk>": 2}) == 2
    assert reference_index({"a": 1}) == 0
