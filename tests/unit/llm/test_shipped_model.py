"""The language model in the package: small, whole, and it has read Shakespeare."""

from __future__ import annotations

import json
import math
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

FOLDER = Path(flambeau.examples.__file__).parent / "shakespeare"
# From a play that is no part of the text it learnt.
UNSEEN = """HAMLET:
To be, or not to be, that is the question:
Whether 'tis nobler in the mind to suffer
The slings and arrows of outrageous fortune,
Or to take arms against a sea of troubles,
And by opposing end them. To die: to sleep;
No more; and by a sleep to say we end
The heart-ache and the thousand natural shocks
That flesh is heir to, 'tis a consummation
Devoutly to be wish'd.

KING CLAUDIUS:
How is it that the clouds still hang on you?
"""
SHUFFLED = " ".join(sorted(UNSEEN.split(), key=lambda word: word[::-1]))


def loss(name: str, text: str) -> float:
    """The mean loss of a token, in nats."""
    model = load_model(FOLDER / name, device="cpu", dtype=torch.float32)
    ids = torch.tensor(load_tokenizer(FOLDER / name).encode(text))
    with torch.inference_mode():
        logits_TV = model.logits(model(ids[:-1], torch.arange(len(ids) - 1), WholeAttention()))
    return F.cross_entropy(logits_TV, ids[1:]).item()


def test_target_and_draft_are_whole_and_together_below_12_megabytes():
    for name in ("target", "draft"):
        files = {file.name for file in (FOLDER / name).iterdir()}
        assert files >= {"model.safetensors", "config.json", "generation_config.json"}
        assert files >= {"tokenizer.model", "tokenizer_config.json"}
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 12_000_000


def test_the_two_share_a_vocabulary_and_the_draft_is_much_smaller():
    configs = [json.loads((FOLDER / name / "config.json").read_text()) for name in ("target", "draft")]
    assert configs[0]["vocab_size"] == configs[1]["vocab_size"] == load_tokenizer(FOLDER / "target").vocab_size
    assert (FOLDER / "target/tokenizer.model").read_bytes() == (FOLDER / "draft/tokenizer.model").read_bytes()
    sizes = [(FOLDER / name / "model.safetensors").stat().st_size for name in ("target", "draft")]
    assert sizes[0] > 8 * sizes[1]


@pytest.mark.parametrize("name", ["target", "draft"])
def test_it_expects_unseen_shakespeare_far_better_than_chance_and_than_the_same_words_in_disorder(name):
    expected = loss(name, UNSEEN)
    assert expected < 0.65 * math.log(1536)
    assert expected < loss(name, SHUFFLED) - 0.5


def test_every_text_comes_back_from_the_vocabulary_as_it_was():
    tokenizer = load_tokenizer(FOLDER / "target")
    for text in (UNSEEN, "  two  spaces\n\n\nand\tthree line ends ", "naïve 🎭 2026 {}", "", "\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_conversation_is_written_as_speeches_that_end():
    tokenizer = load_tokenizer(FOLDER / "target")
    ids = tokenizer.encode_chat([{"role": "user", "content": "What light is that?"}])
    speech = tokenizer.encode("JULIET:\nWhat light is that?", add_special=False)
    assert ids == [1, *speech, 2, *tokenizer.encode("ROMEO:\n", add_special=False)]


def test_what_training_measured_is_beside_the_weights():
    figures = json.loads((FOLDER / "training.json").read_text())["figures"]
    for name in ("target", "draft"):
        assert figures[name]["bytes"] == (FOLDER / name / "model.safetensors").stat().st_size


def test_its_draft_changes_nothing_but_the_time():
    prompts = [f"{name}:\n" for name in ("ROMEO", "JULIET", "KING HENRY", "First Citizen", "GLOUCESTER")]
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
