"""The training script and the engine agree on weights; what it trains with does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from flambeau.llm.backends.eager import WholeAttention

ROOT = Path(__file__).parents[3]
VOCABULARY = ROOT / "src/flambeau/examples/storyteller/target/tokenizer.model"


pytestmark = pytest.mark.usefixtures("training_modules")


def test_weights_it_saves_are_those_the_engine_loads(tmp_path):
    from learning import logits_of
    from networks import DRAFT, create, load, save

    model = create(tmp_path, DRAFT, VOCABULARY, 4096).requires_grad_(False)
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())
    save(model, tmp_path)
    ids_BT = torch.randint(4096, (2, 20))
    loaded = load(tmp_path)
    expected_BTV = loaded.logits(loaded(ids_BT, torch.arange(20), WholeAttention()))
    torch.testing.assert_close(logits_of(model, ids_BT), expected_BTV, rtol=1e-5, atol=1e-5)


def test_text_written_with_a_cache_is_the_text_the_whole_network_prefers(tmp_path):
    from learning import logits_of
    from networks import load
    from writing import write

    draft = load(VOCABULARY.parents[1] / "draft")
    prompts_BT = torch.tensor([[1, 814, 1495, 300], [1, 448, 1110, 1495]])
    ids_BT, logits_BTV = write(draft, prompts_BT, 0.0, length=30, generator=torch.Generator())
    whole_BTV = logits_of(draft, ids_BT[:, :-1])
    assert torch.equal(ids_BT[:, 4:], whole_BTV[:, 3:].argmax(-1))
    torch.testing.assert_close(logits_BTV.float(), whole_BTV, rtol=2e-3, atol=2e-2)


def test_a_document_begins_and_a_message_ends_with_a_control_token():
    import sentencepiece
    from corpus import encode

    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(VOCABULARY))
    spell = vocabulary.encode
    assert encode("Once there was a fox.", vocabulary) == [1, *spell("Once there was a fox."), 2]
    talk = encode([("Reader", "Hello!"), ("Storyteller", "Welcome!")], vocabulary)
    assert talk == [1, *spell("Reader:\nHello!"), 2, *spell("Storyteller:\nWelcome!"), 2]


def test_windows_begin_with_a_document_and_labels_are_the_tokens_that_follow():
    from corpus import Corpus, held_out

    corpus = Corpus(VOCABULARY, torch.device("cpu"), shards=1, processes=1, documents=20)
    corpus.wait_for(1)
    corpus.close()
    batch = corpus.draw(torch.Generator().manual_seed(0), windows=3, length=20)
    assert batch.ids_BT[:, 0].tolist() == [1, 1, 1]
    for each in (batch, held_out(VOCABULARY, documents=5, length=20)):
        assert torch.equal(each.ids_BT[:, 1:], each.labels_BT[:, :-1])


def test_a_step_of_muon_has_the_same_size_in_every_direction():
    from muon import orthogonalize

    tall_NRC = torch.randn(3, 40, 20, generator=torch.Generator().manual_seed(0))
    for matrices in (tall_NRC, tall_NRC.mT):
        sizes = torch.linalg.svdvals(orthogonalize(matrices))
        assert sizes.min() > 0.6
        assert sizes.max() < 1.3


def test_a_draft_like_its_target_has_everything_in_common_with_it():
    from draft import compare_logits

    logits_BTV = torch.randn(2, 5, 30)
    divergence, overlap = compare_logits(logits_BTV, logits_BTV)
    assert (divergence.item(), overlap.item()) == (pytest.approx(0, abs=1e-6), pytest.approx(1))
    divergence, overlap = compare_logits(logits_BTV, -logits_BTV)
    assert divergence > 0.5
    assert overlap < 0.8


def test_the_same_seed_makes_the_same_documents_and_another_seed_others():
    from corpus import make_documents

    documents = make_documents(60, seed=1)
    assert documents == make_documents(60, seed=1)
    assert len({str(document) for document in [*documents, *make_documents(60, seed=2)]}) > 110


def test_documents_are_clean_english():
    from corpus import make_documents, text_of

    text = "\n".join(map(text_of, make_documents(300, seed=3)))
    assert not re.search(r"[{}\[\]|]|  | [,.]|\.\.", text)
    assert not re.search(r"\ba (?!unicorn)[aeiou]", text)
    assert not re.search(r"\ban (?!hour|honest)[^aeiou]", text)
    assert not re.search(r"[a-z]\. [a-z]|\.\" [a-z]", text)
