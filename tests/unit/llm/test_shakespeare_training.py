"""The training script and the engine agree on weights; what it trains with does what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from flambeau.llm.backends.eager import WholeAttention

ROOT = Path(__file__).parents[3]
VOCABULARY = ROOT / "src/flambeau/examples/shakespeare/target/tokenizer.model"


@pytest.fixture(autouse=True)
def _training_modules(monkeypatch):
    """Its modules are found as when it runs."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(ROOT / "training" / "shakespeare")
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(ROOT / "training")):
            del sys.modules[name]


def test_weights_it_saves_are_those_the_engine_loads(tmp_path):
    from learning import logits_of
    from networks import DRAFT, create, load, save

    model = create(tmp_path, DRAFT, VOCABULARY, 1536).requires_grad_(False)
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())
    save(model, tmp_path)
    ids_BT = torch.randint(1536, (2, 20))
    loaded = load(tmp_path)
    expected_BTV = loaded.logits(loaded(ids_BT, torch.arange(20), WholeAttention()))
    torch.testing.assert_close(logits_of(model, ids_BT), expected_BTV, rtol=1e-5, atol=1e-5)


def test_a_network_that_grows_deeper_computes_what_it_did(tmp_path):
    from learning import logits_of
    from networks import DRAFT, create, deepen, shallow

    one = create(tmp_path, DRAFT, VOCABULARY, 1536)
    four = deepen(one, shallow(one, 4))
    ids_BT = torch.randint(1536, (2, 20))
    assert len(four.model.layers) == 4
    torch.testing.assert_close(logits_of(four, ids_BT), logits_of(one, ids_BT))


def test_text_written_with_a_cache_is_the_text_the_whole_network_prefers(tmp_path):
    from learning import logits_of
    from networks import load
    from writing import write

    draft = load(VOCABULARY.parents[1] / "draft")
    prompts_BT = torch.tensor([[1, 814, 1495, 3], [1, 448, 1110, 1495]])
    ids_BT, logits_BTV = write(draft, prompts_BT, torch.zeros(2), length=30, generator=torch.Generator())
    whole_BTV = logits_of(draft, ids_BT[:, :-1])
    assert torch.equal(ids_BT[:, 4:], whole_BTV[:, 3:].argmax(-1))
    torch.testing.assert_close(logits_BTV.float(), whole_BTV, rtol=2e-3, atol=2e-2)


def test_a_conversation_teaches_every_end_of_a_turn_but_the_first():
    import sentencepiece
    from corpus import IGNORED, Corpus

    text = "".join(f"{name}:\nSpeak, number {i}.\n\n" for i in range(200) for name in ("ROMEO", "JULIET"))
    corpus = Corpus(text, sentencepiece.SentencePieceProcessor(model_file=str(VOCABULARY)))
    ids, labels = corpus._draw_conversation(torch.Generator().manual_seed(0), 100)
    following = ids[1:]
    assert (labels == IGNORED).sum() == 1
    first, *others = (following == corpus.eos).nonzero().flatten().tolist()
    assert labels[first] == IGNORED
    assert others
    assert all(labels[i] == corpus.eos for i in others)
