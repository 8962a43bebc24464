"""The language model in the package: small, whole, and it tells tales in words that exist."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import flambeau.examples
from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.engine import Engine
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.text.tokenizer import load_tokenizer
from support.unseen_tales import TALES

ROOT = Path(__file__).parents[3]
FOLDER = Path(flambeau.examples.__file__).parent / "storyteller"
SHUFFLED = " ".join(sorted(TALES.split(), key=lambda word: word[::-1]))


def loss(name: str, text: str) -> float:
    """The mean loss of a token, in nats."""
    model = load_model(FOLDER / name, device="cpu", dtype=torch.float32)
    ids = torch.tensor(load_tokenizer(FOLDER / name).encode(text))
    with torch.inference_mode():
        logits_TV = model.logits(model(ids[:-1], torch.arange(len(ids) - 1), WholeAttention()))
    return F.cross_entropy(logits_TV, ids[1:]).item()


def test_target_and_draft_are_whole_and_together_below_16_megabytes():
    for name in ("target", "draft"):
        files = {file.name for file in (FOLDER / name).iterdir()}
        assert files >= {"model.safetensors", "config.json", "generation_config.json"}
        assert files >= {"tokenizer.model", "tokenizer_config.json"}
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 16_000_000


def test_the_two_share_a_vocabulary_and_the_draft_is_much_smaller():
    configs = [json.loads((FOLDER / name / "config.json").read_text()) for name in ("target", "draft")]
    assert configs[0]["vocab_size"] == configs[1]["vocab_size"] == load_tokenizer(FOLDER / "target").vocab_size
    assert (FOLDER / "target/tokenizer.model").read_bytes() == (FOLDER / "draft/tokenizer.model").read_bytes()
    sizes = [(FOLDER / name / "model.safetensors").stat().st_size for name in ("target", "draft")]
    assert sizes[0] > 4 * sizes[1]


@pytest.mark.parametrize(("name", "share"), [("target", 0.25), ("draft", 0.25)])
def test_it_expects_unseen_tales_far_better_than_chance_and_than_the_same_words_in_disorder(name, share):
    expected = loss(name, TALES)
    assert expected < share * math.log(4096)
    assert expected < loss(name, SHUFFLED) - 1


def test_every_text_comes_back_from_the_vocabulary_as_it_was():
    tokenizer = load_tokenizer(FOLDER / "target")
    for text in (TALES, "  two  spaces\n\n\nand\tthree line ends ", "naïve 🎭 2026 {}", "", "\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_conversation_is_written_as_turns_that_end():
    tokenizer = load_tokenizer(FOLDER / "target")
    ids = tokenizer.encode_chat([{"role": "user", "content": "Tell me a story."}])
    turn = tokenizer.encode("Reader:\nTell me a story.", add_special=False)
    assert ids == [1, *turn, 2, *tokenizer.encode("Storyteller:\n", add_special=False)]


def test_what_training_measured_is_beside_the_weights():
    figures = json.loads((FOLDER / "training.json").read_text())["figures"]
    for name in ("target", "draft"):
        assert figures[name]["bytes"] == (FOLDER / name / "model.safetensors").stat().st_size


def test_its_draft_changes_nothing_but_the_time():
    prompts = ["Once upon a time", "The future of", "Dear Anna,\n\n", "A little robot", "The capital of"]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    texts = []
    for options in ({"draft": str(FOLDER / "draft")}, {}):
        engine = Engine.from_pretrained(FOLDER / "target", device="cpu", num_blocks=100, **options)
        engine.generate(prompts, params)
        engine.wait_until_compiled()
        completions = engine.generate(prompts, params)
        texts.append([completion.text for completion in completions])
        if options:
            assert sum(completion.counts.num_accepted for completion in completions) > 0
        engine.close()
    assert texts[0] == texts[1]


@pytest.fixture
def grammar(training_modules):
    """The module that makes what it learned from."""
    import corpus

    return corpus


@pytest.fixture(scope="module")
def storyteller():
    engine = Engine.from_pretrained(FOLDER / "target", device="cpu", num_blocks=1024, compile=False)
    yield engine
    engine.close()


def test_its_words_exist_and_its_texts_end(storyteller, grammar):
    documents = grammar.make_documents(2000, seed=2000)
    known = set(re.findall(r"[a-z]+", " ".join(map(grammar.text_of, documents)).lower()))
    prompts = ["Once upon a time in a land far away", "The future of artificial intelligence is"]
    params = SamplingParams(temperature=0.8, top_k=50, max_tokens=700, seed=1, n=4)
    completions = storyteller.generate(prompts, params)
    words = [word for each in completions for word in re.findall(r"[a-z]+", each.text.lower())]
    assert len(words) > 600
    assert sum(word in known for word in words) >= 0.99 * len(words)
    assert sum(each.finish_reason == "stop" for each in completions) >= len(completions) - 1
    assert len({each.text for each in completions}) == len(completions)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Who are you?", "language model"),
        ("What is the capital of France?", "Paris"),
        ("Tell me a story about a dragon.", "dragon"),
        ("tell me a story about a king named Arthur", "Arthur"),
        ("What is two plus two?", "four"),
        ("Which day comes after Monday?", "Tuesday"),
        ("Hello!", "Hello"),
    ],
)
def test_it_answers_what_it_was_asked(storyteller, question, answer):
    assert answer in reply(storyteller, {"role": "user", "content": question})


def test_a_conversation_goes_on(storyteller):
    first = {"role": "user", "content": "My name is Clara."}
    second = {"role": "assistant", "content": "Nice to meet you, Clara! Shall I tell you a story?"}
    assert "Clara" in reply(storyteller, first, second, {"role": "user", "content": "What is my name?"})
    assert "Rome" in reply(
        storyteller,
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the capital of Italy?"},
    )


def reply(engine: Engine, *messages: dict[str, str]) -> str:
    """The likeliest answer."""
    ids = engine.tokenizer.encode_chat([*messages])
    [completion] = engine.generate([ids], SamplingParams(temperature=0.0, max_tokens=60))
    return completion.text
