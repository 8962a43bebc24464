from __future__ import annotations

import pytest
import torch

from flambeau.errors import HandlerError
from flambeau.handlers.text.vocabulary import index_of, load_vocabulary, reference_index


class Old:
    """A vocabulary as torchtext pickled it."""

    words = ("<unk>", "a")

    def __getitem__(self, token):
        if token not in self.words:
            raise RuntimeError(f"Token {token} not found and default index is not set")
        return self.words.index(token)


class Asked:
    def lookup(self, token):
        return {"a": 4}[token]


def test_dict_and_list_are_read(tmp_path):
    for saved in ({"a": 0, "b": 1}, ["a", "b"]):
        torch.save(saved, tmp_path / "v.pt")
        assert load_vocabulary(tmp_path / "v.pt") == {"a": 0, "b": 1}


def test_unknown_tokens_are_dropped_or_have_a_number():
    assert index_of({"a": 3}, "b") is None
    assert index_of({"a": 3, "<unk>": 0}, "b") == 0
    assert index_of({"a": 0, "<unk>": 5}, "a") == 0
    assert index_of(Old(), "b") == 0
    assert index_of(Old(), "a") == 1
    assert index_of(Asked(), "a") == 4
    assert index_of(Asked(), "b") is None


def test_objects_need_the_owners_word(tmp_path):
    torch.save(Old(), tmp_path / "v.pt")
    with pytest.raises(HandlerError, match="weights_only: false"):
        load_vocabulary(tmp_path / "v.pt")
    assert load_vocabulary(tmp_path / "v.pt", weights_only=False)["a"] == 1


def test_what_is_no_vocabulary_is_refused(tmp_path):
    torch.save(torch.zeros(2), tmp_path / "v.pt")
    with pytest.raises(HandlerError, match="Tensor"):
        load_vocabulary(tmp_path / "v.pt")


def test_reference_says_nothing():
    assert reference_index({"<pad>": 7, "<unk>": 2}) == 7
    assert reference_index({"<unk>": 2}) == 2
    assert reference_index({"a": 1}) == 0
