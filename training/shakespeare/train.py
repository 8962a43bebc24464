"""Train the language model that Flambeau ships: a vocabulary, a target and a draft that guesses for it.

    python training/shakespeare/train.py --text tinyshakespeare.txt --out build/shakespeare

makes everything in src/flambeau/examples/shakespeare anew. Every stage reads what the stages before it left in the
folder, so that `--only draft` trains a new draft for the target that is there.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from corpus import Corpus, split_at, train_vocabulary
from draft import begin_alike, collect, train_draft
from learning import Journal
from measure import compare, held_out_loss
from networks import DRAFT, TARGET, create, load, write_json
from target import train_target
from writing import write

STAGES = ("vocabulary", "target", "draft", "measure")


def main() -> None:
    """Run the stages asked for."""
    options = read_options()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    out, text = options.out, options.text.read_text()
    journal, file = Journal(out), out / "target" / "tokenizer.model"
    stages = options.only or STAGES
    if "vocabulary" in stages:
        journal.start()
        train_vocabulary(text[: split_at(text)], file, size=options.vocab_size)
    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(file))
    corpus = Corpus(text, vocabulary)
    journal.note(f"{len(corpus.ids)} tokens to learn from, {len(corpus.held_out_ids)} held out")
    if "target" in stages:
        model = create(out / "target", TARGET, file, len(vocabulary))
        limits = {"steps": options.target_steps, "minutes": options.target_minutes}
        record(out, target=train_target(model, corpus, out / "target", journal, dropout=options.dropout, **limits))
    if "draft" in stages:
        target = load(out / "target")
        model = begin_alike(create(out / "draft", DRAFT, file, len(vocabulary)), target)
        lessons = collect(target, corpus, journal, tokens=options.lesson_tokens, minutes=options.draft_minutes / 2)
        limits = {"steps": options.draft_steps, "minutes": options.draft_minutes / 2}
        record(out, draft=train_draft(model, lessons, out / "draft", journal, **limits))
    if "measure" in stages:
        measure(out, corpus, vocabulary, journal)


def measure(out: Path, corpus: Corpus, vocabulary: Any, journal: Journal) -> None:
    """Figures of the weights in the files, in training.json, and a sample to read."""
    generator = torch.Generator().manual_seed(4)
    models = {name: load(out / name) for name in ("target", "draft")}
    per_token = len(corpus.held_out_ids) / corpus.characters_held_out
    figures: dict[str, Any] = {"tokens_held_out": len(corpus.held_out_ids), "tokens_learnt": len(corpus.ids)}
    for name, model in models.items():
        loss = held_out_loss(model, corpus)
        figures[name] = {
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "bytes": (out / name / "model.safetensors").stat().st_size,
            "held_out_loss": round(loss, 4),
            "held_out_perplexity": round(math.exp(loss), 2),
            "held_out_loss_per_character": round(loss * per_token, 4),
        }
    figures["speculation"] = compare(models["target"], models["draft"], corpus, generator)
    prompt = torch.tensor([[corpus.bos, *vocabulary.encode("ROMEO:\n")]])
    ids_BT, _ = write(models["target"], prompt, torch.tensor([0.8]), length=prompt.shape[1] + 300, generator=generator)
    figures["sample"] = vocabulary.decode(ids_BT[0].tolist()).split("\n")
    names = ("torch", "sentencepiece", "safetensors")
    figures["versions"] = {"python": platform.python_version(), **{name: version(name) for name in names}}
    record(out, figures=figures)
    for name in ("target", "draft", "speculation"):
        journal.note(f"{name}: {json.dumps(figures[name])}")


def record(out: Path, **results: Any) -> None:
    """Add to training.json."""
    file = out / "training.json"
    write_json(file, (json.loads(file.read_text()) if file.exists() else {}) | results)


def read_options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="the text to learn from")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--only", choices=STAGES, action="append", help="run this stage; may be given several times")
    parser.add_argument("--vocab-size", type=int, default=1536)
    parser.add_argument("--target-steps", type=int, default=1500)
    parser.add_argument("--target-minutes", type=float, default=240.0, help="decay to the end within this time")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lesson-tokens", type=int, default=470_000, help="tokens the draft learns from")
    parser.add_argument("--draft-steps", type=int, default=2500)
    parser.add_argument("--draft-minutes", type=float, default=120.0, help="half for lessons, half for learning")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
