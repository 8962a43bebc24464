"""Figures of trained networks: words that exist, repetition, agreement of the two, and text to read.

    python training/storyteller/measure.py src/flambeau/examples/storyteller

Shapes: B sequences or windows · T tokens · V vocabulary
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from conversations import READER, STORYTELLER
from corpus import FIRST_SEED, encode, held_out, make_documents, text_of
from learning import Journal, logits_of
from networks import load
from target import held_out_loss
from torch import Tensor
from writing import write

from flambeau.llm.models.transformer import Transformer

WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
PROMPTS = (
    "Once upon a time in a land far away",
    "The future of artificial intelligence is",
    "Once upon a time",
    "There was once a",
    "One winter morning",
    "A little robot",
    "Dear Anna",
    "The capital of France is",
    "ROMEO:",
    "My name is",
)
QUESTIONS = (
    "Tell me a story about a dragon.",
    "What is the capital of Italy?",
    "Hello!",
    "How do I make pancakes?",
    "Who are you?",
    "Tell me a story about a king named Arthur.",
)
NGRAM = 8
LONGEST = 700  # tokens of a text


def measure(
    folder: Path,
    journal: Journal | None = None,
    *,
    copies: int = 12,
    device: str = "cpu",
    texts_file: Path | None = None,
) -> dict[str, Any]:
    """Figures of the weights in the files of a folder, computed in float32; the texts go to a file, if one is given."""
    generator = torch.Generator(device).manual_seed(4)
    file = folder / "target" / "tokenizer.model"
    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(file))
    models = {name: load(folder / name).requires_grad_(False).to(device) for name in ("target", "draft")}
    check = held_out(file, documents=200, length=512).to(device)
    figures: dict[str, Any] = {}
    for name, model in models.items():
        loss = held_out_loss(model, check, at_once=4)
        figures[name] = {
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "bytes": (folder / name / "model.safetensors").stat().st_size,
            "held_out_loss": round(loss, 4),
            "held_out_perplexity": round(math.exp(loss), 2),
        }
    texts = write_texts(models["target"], vocabulary, generator, copies=copies)
    if texts_file:
        texts_file.write_text(json.dumps(texts, indent=1))
    figures["texts"] = read_texts([text for some in texts.values() for text in some])
    figures["speculation"] = compare(models["target"], models["draft"], vocabulary, generator)
    figures["samples"] = {prompt: some[0] for prompt, some in texts.items()}
    if journal:
        for name in ("target", "draft", "texts", "speculation"):
            journal.note(f"{name}: {json.dumps(figures[name])}")
    return figures


def write_texts(
    model: Transformer, vocabulary: Any, generator: torch.Generator, *, copies: int, temperature: float = 0.8
) -> dict[str, list[str]]:
    """Texts from prompts and in conversations, each up to its end, without the prompt."""
    bos, eos = vocabulary.bos_id(), vocabulary.eos_id()
    prompts = {prompt: [bos, *vocabulary.encode(prompt)] for prompt in PROMPTS}
    for question in QUESTIONS:
        asked = vocabulary.encode(f"{READER}:\n{question}")
        prompts[question] = [bos, *asked, eos, *vocabulary.encode(f"{STORYTELLER}:\n")]
    texts = {}
    for prompt, ids in prompts.items():
        prompts_BT = torch.tensor([ids] * copies, device=generator.device)
        ids_BT, _ = write(model, prompts_BT, temperature, length=LONGEST, generator=generator, eos=eos)
        rows = ids_BT[:, len(ids) :].tolist()
        texts[prompt] = [vocabulary.decode(row[: row.index(eos)] if eos in row else row) for row in rows]
    return texts


def read_texts(texts: Sequence[str]) -> dict[str, Any]:
    """The share of their words that the grammar knows, how often they repeat themselves, and what is learnt by heart.

    Other documents of the grammar tell which shares to expect of a text that nobody learnt by heart.
    """
    learnt_documents = list(map(text_of, make_documents(6000, FIRST_SEED)))
    fresh = list(map(text_of, make_documents(400, FIRST_SEED - 1)))
    known = {word.lower() for text in learnt_documents for word in WORD.findall(text)}
    written = [word for text in texts for word in WORD.findall(text)]
    unknown = Counter(word for word in written if word.lower() not in known)
    learnt = {ngram for text in learnt_documents for ngram in ngrams_of(text)}
    figures: dict[str, Any] = {
        "texts": len(texts),
        "distinct_texts": len(set(texts)),
        "words": len(written),
        "words_known": round(1 - sum(unknown.values()) / len(written), 5),
        "words_unknown": sorted(unknown)[:50],
    }
    for name, some in (("own", texts), ("fresh", fresh)):
        ngrams = [list(ngrams_of(text)) for text in some]
        total = sum(map(len, ngrams))
        figures[f"{NGRAM}_grams_learnt_{name}"] = round(sum(g in learnt for each in ngrams for g in each) / total, 4)
        repeated = sum(len(each) - len(set(each)) for each in ngrams)
        figures[f"{NGRAM}_grams_repeated_{name}"] = round(repeated / total, 4)
    return figures


def ngrams_of(text: str) -> Iterator[tuple[str, ...]]:
    """Its runs of words."""
    words = WORD.findall(text)
    return zip(*(words[start:] for start in range(NGRAM)), strict=False)


def compare(target: Transformer, draft: Transformer, vocabulary: Any, generator: torch.Generator) -> dict[str, Any]:
    """Acceptance at several temperatures, on fresh text."""
    rows = [encode(document, vocabulary)[:12] for document in make_documents(40, FIRST_SEED - 2)]
    prompts_BT = torch.tensor([row for row in rows if len(row) == 12][:16], device=generator.device)
    results = {}
    for temperature in (0.0, 0.5, 0.8, 1.0):
        ids_BT, _ = write(target, prompts_BT, temperature, length=256, generator=generator)
        results[f"temperature_{temperature}"] = agreement(target, draft, ids_BT, prompts_BT.shape[1], temperature)
    return results


@torch.no_grad()
def agreement(
    target: Transformer, draft: Transformer, ids_BT: Tensor, start: int, temperature: float
) -> dict[str, Any]:
    """How often the draft's tokens are accepted in text the target wrote from `start` on."""
    ours_BTV = logits_of(target, ids_BT)[:, start - 1 : -1]
    theirs_BTV = logits_of(draft, ids_BT)[:, start - 1 : -1]
    if temperature == 0:
        accepted_BT = (ours_BTV.argmax(-1) == theirs_BTV.argmax(-1)).float()
    else:
        p_BTV, q_BTV = (ours_BTV / temperature).softmax(-1), (theirs_BTV / temperature).softmax(-1)
        accepted_BT = torch.minimum(p_BTV, q_BTV).sum(-1)
    figures = {f"tokens_per_round_k{k}": round(accepted_length(accepted_BT, k), 3) for k in (3, 4, 5)}
    return {"acceptance": round(accepted_BT.mean().item(), 4), **figures}


def accepted_length(accepted_BT: Tensor, k: int) -> float:
    """The mean number of tokens of a round with k drafted ones: those accepted, and one of the target's own."""
    chains_BWK = accepted_BT.unfold(1, k, 1).cumprod(-1)
    return 1 + chains_BWK.sum(-1).mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with target/ and draft/")
    parser.add_argument("--copies", type=int, default=12, help="texts from each prompt")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--texts", type=Path, help="a file for all texts")
    given = parser.parse_args()
    results = measure(given.folder, copies=given.copies, device=given.device, texts_file=given.texts)
    print(json.dumps(results, indent=2, ensure_ascii=False))
