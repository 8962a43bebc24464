"""Train the language model that Flambeau ships: a vocabulary, a target and a draft that guesses for it.

    python training/storyteller/train.py --out build/storyteller

makes everything in src/flambeau/examples/storyteller anew; the text comes from the grammar beside it. Every stage
reads what the stages before it left in the folder, so that `--only draft` trains a new draft for the target that is
there. It is meant for a GPU; on a CPU give it small numbers, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from corpus import SHARD, VOCABULARY_SEED, Corpus, held_out, make_documents, train_vocabulary
from draft import begin_alike, train_draft
from learning import Journal
from measure import measure
from networks import DRAFT, TARGET, create, load, write_json
from target import train_target

STAGES = ("vocabulary", "target", "draft", "measure")


def main() -> None:
    """Run the stages asked for."""
    options = read_options()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    out, stages = options.out, options.only or STAGES
    journal, file = Journal(out), out / "target" / "tokenizer.model"
    if "vocabulary" in stages:
        journal.start()
        train_vocabulary(make_documents(options.documents, VOCABULARY_SEED), file, size=options.vocab_size)
        journal.note("vocabulary: done")
    if "target" in stages or "draft" in stages:
        train(options, stages, device, journal, file)
    if "measure" in stages:
        names = ("torch", "sentencepiece", "safetensors")
        versions = {"python": platform.python_version(), **{name: version(name) for name in names}}
        record(out, figures=measure(out, journal, device=options.device) | {"versions": versions})


def train(options: argparse.Namespace, stages: list[str], device: torch.device, journal: Journal, file: Path) -> None:
    """The two networks, while other processes make the text."""
    out = options.out
    corpus = Corpus(file, device, shards=options.shards, processes=options.processes)
    limits = {"windows": options.windows, "length": options.length}
    try:
        check = held_out(file, documents=options.held_out, length=options.length).to(device)
        corpus.wait_for(min(options.shards, 4) * SHARD * 100)
        journal.note(f"{len(corpus.ids)} tokens to begin with, {check.ids_BT.numel()} held out")
        if "target" in stages:
            model = create(out / "target", TARGET, file, options.vocab_size).to(device)
            limits |= {"steps": options.target_steps, "minutes": options.target_minutes}
            record(out, target=train_target(model, corpus, check, out / "target", journal, **limits))
        if "draft" in stages:
            target = load(out / "target").to(device)
            model = begin_alike(create(out / "draft", DRAFT, file, options.vocab_size).to(device), target)
            limits |= {"steps": options.draft_steps, "minutes": options.draft_minutes}
            record(out, draft=train_draft(model, target, corpus, out / "draft", journal, **limits))
    finally:
        corpus.close()


def record(out: Path, **results: Any) -> None:
    """Add to training.json."""
    file = out / "training.json"
    write_json(file, (json.loads(file.read_text()) if file.exists() else {}) | results)


def read_options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--only", choices=STAGES, action="append", help="run this stage; may be given several times")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="that make text")
    parser.add_argument("--documents", type=int, default=20_000, help="to make the vocabulary from")
    parser.add_argument("--held-out", type=int, default=600, help="documents to measure the loss with")
    parser.add_argument("--shards", type=int, default=2500, help=f"of {SHARD} documents, to learn from at most")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--windows", type=int, default=64, help="of a step")
    parser.add_argument("--length", type=int, default=1024, help="of a window, in tokens")
    parser.add_argument("--target-steps", type=int, default=100_000)
    parser.add_argument("--target-minutes", type=float, default=4.5, help="decay to the end within this time")
    parser.add_argument("--draft-steps", type=int, default=100_000)
    parser.add_argument("--draft-minutes", type=float, default=1.5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
