from __future__ import annotations

import time

import pytest
import torch

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.text_classifier import (
    TextBatch,
    TextClassifier,
    get_tokenizer,
    index_of,
    load_vocabulary,
    ngrams_iterator,
    reference_index,
    text_of,
)
from flambeau.worker.context import Context
from support.packing import NETWORKS


@pytest.fixture
def handler(tmp_path):
    (tmp_path / "tiny_text.py").write_text((NETWORKS / "tiny_text.py").read_text())
    torch.save(["<pad>", "a", "day"], tmp_path / "source_vocab.pt")
    handler = TextClassifier()
    handler.initialize(Context("m", str(tmp_path), {"model": {"modelFile": "tiny_text.py"}}, 1, None, "1"))
    return handler


@pytest.mark.perf
@pytest.mark.parametrize("text", ["<" * 500_000, "&" * 500_000, "&a" * 300_000, "'" * 500_000, "<>" * 300_000])
def test_time_to_clean_a_text_is_linear(text):
    began = time.process_time()
    TextClassifier().clean(text)
    assert time.process_time() - began < 10


def test_methods_that_subclasses_use_exist(handler):
    assert handler._remove_html_tags("<a>b") == "b"
    assert handler._expand_contractions("it's") == "it is"
    assert handler._remove_accented_characters("é") == "e"
    assert handler._remove_puncutation("a!") == handler._remove_punctuation("a!") == "a"
    assert handler._tokenize("A day.") == ["a", "day", "."]
    assert handler.get_word_token(["Ġa", "day"]) == ["a", "day"]
    summary = handler.summarize_attributions(torch.tensor([[[3.0, 0], [2.0, 2.0]]]))
    assert summary.tolist() == pytest.approx([0.6, 0.8])


def test_offsets_say_where_each_text_begins(handler):
    batch = handler.preprocess([{"data": "a day"}, {"body": b"day"}, "a"])
    assert handler.preprocess([{"body": {"data": "a day"}}]).words == [["a", "day"]]
    assert batch.indices.tolist() == [1, 2, 2, 1]
    assert batch.offsets.tolist() == [0, 2, 3]
    assert batch.words == [["a", "day"], ["day"], ["a"]]
    assert len(handler.postprocess(handler.inference(batch))) == 3


def test_pair_of_an_older_preprocess_still_infers(handler):
    indices = torch.tensor([1, 2])
    batch = TextBatch(indices, torch.tensor([0]), [])
    assert torch.equal(handler.inference((indices, "a day")), handler.inference(batch))


def test_explanations_need_an_eager_model_with_an_embedding(handler):
    batch = handler.preprocess([{"data": "a day"}])
    assert len(handler.get_insights(batch, None)[0]["importances"]) == 2
    handler.model = torch.nn.Linear(1, 1)
    with pytest.raises(BadRequest, match="embedding"):
        handler.get_insights(batch, None)


def test_layer_that_is_no_bag_is_explained_by_captums_layer_attribution(handler):
    class Summing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(3, 4)
            self.fc = torch.nn.Linear(4, 2)

        def forward(self, text, offsets):
            return self.fc(self.embedding(text))

    handler.model = Summing()
    [insight] = handler.get_insights(handler.preprocess([{"data": "a day"}]), None, 1)
    vectors = handler.model.embedding.weight
    exact = ((vectors[[1, 2]] - vectors[0]) @ handler.model.fc.weight[1]).detach()
    assert insight["importances"] == pytest.approx((exact / exact.norm()).tolist(), abs=1e-3)


def test_missing_vocabulary_is_reported_with_the_remedy(tmp_path):
    with pytest.raises(HandlerError, match=r"source_vocab.*--extra-files"):
        TextClassifier().get_source_vocab_path(Context("m", str(tmp_path), None, 1, None, "1"))


def test_manifest_may_name_the_vocabulary(tmp_path):
    (tmp_path / "words.pt").write_bytes(b"")
    context = Context("m", str(tmp_path), {"model": {"sourceVocab": "words.pt"}}, 1, None, "1")
    assert TextClassifier().get_source_vocab_path(context) == str(tmp_path / "words.pt")


def test_only_text_is_text():
    assert text_of(bytearray("grüße".encode())) == "grüße"
    for value in (b"\xff", 3, ["a"], {"a": 1}):
        with pytest.raises(BadRequest):
            text_of(value)


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
