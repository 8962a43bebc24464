"""The text: documents that the grammar makes, their vocabulary, and windows of tokens.

Shapes: B windows · T tokens
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import Thread

import numpy
import sentencepiece
import torch
from conversations import Message, conversation
from fables import adventure, bedtime, fable, memory, mystery
from miscellany import capital, diary, essay, facts, forecast, letter, recipe, scene, verse
from plays import play
from quests import quest
from sketches import sketch
from tales import tale
from torch import Tensor

FORMS: dict[Callable[[random.Random], str], int] = {
    tale: 40,
    quest: 16,
    fable: 8,
    mystery: 5,
    memory: 3,
    adventure: 4,
    play: 7,
    essay: 7,
    letter: 3,
    diary: 3,
    recipe: 2,
    forecast: 1,
    verse: 3,
    scene: 3,
    facts: 4,
    capital: 3,
    bedtime: 1,
    sketch: 9,
}
CHAT_SHARE = 0.25  # of the documents are conversations
HELD_OUT_SEED, VOCABULARY_SEED, FIRST_SEED = 0, 1, 1000  # of the documents of each purpose
SHARD = 2000  # documents that are made at once

Document = str | list[Message]


def make_documents(count: int, seed: int) -> list[Document]:
    """The same documents for the same seed."""
    rng = random.Random(seed)
    forms, weights = list(FORMS), list(FORMS.values())
    return [
        conversation(rng) if rng.random() < CHAT_SHARE else rng.choices(forms, weights)[0](rng) for _ in range(count)
    ]


def text_of(document: Document) -> str:
    """The document without control tokens."""
    if isinstance(document, str):
        return document
    return "\n".join(f"{name}:\n{text}" for name, text in document)


def train_vocabulary(documents: Iterable[Document], file: Path, *, size: int) -> None:
    """Write a SentencePiece model that spells every text, line ends and runs of spaces included."""
    lines = [line for document in documents for line in text_of(document).splitlines() if line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        character_coverage=1.0,
        user_defined_symbols=["\n", "\n\n"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,  # a prompt's first word is spelt as at the start of any line
        split_digits=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        minloglevel=2,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(model.getvalue())


def encode(document: Document, vocabulary: sentencepiece.SentencePieceProcessor) -> list[int]:
    """The tokens of a document, from BOS to EOS; in a conversation every message ends with EOS."""
    bos, eos = vocabulary.bos_id(), vocabulary.eos_id()
    if isinstance(document, str):
        return [bos, *vocabulary.encode(document), eos]
    return [bos, *(token for name, text in document for token in (*vocabulary.encode(f"{name}:\n{text}"), eos))]


def make_shard(task: tuple[str, int, int]) -> bytes:
    """The tokens of many documents, two bytes each; runs in a process of its own."""
    file, seed, count = task
    vocabulary = sentencepiece.SentencePieceProcessor(model_file=file)
    rows = [encode(document, vocabulary) for document in make_documents(count, seed)]
    return numpy.array([token for row in rows for token in row], dtype=numpy.int16).tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Windows of tokens, and for each token the one that follows."""

    ids_BT: Tensor
    labels_BT: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The same, there."""
        return Batch(ids_BT=self.ids_BT.to(device), labels_BT=self.labels_BT.to(device))


class Corpus:
    """Tokens of documents on the device. Processes make more of them while a network learns from those there are."""

    def __init__(
        self, vocabulary_file: Path, device: torch.device, *, shards: int, processes: int, documents: int = SHARD
    ) -> None:
        self._vocabulary_file, self._device = vocabulary_file, device
        vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(vocabulary_file))
        self.bos, self.eos = vocabulary.bos_id(), vocabulary.eos_id()
        self._shards: list[Tensor] = []
        self._pool = get_context("spawn").Pool(processes)
        tasks = [(str(vocabulary_file), FIRST_SEED + number, documents) for number in range(shards)]
        self._results = self._pool.imap_unordered(make_shard, tasks)
        self.ids, self.starts = torch.empty(0, dtype=torch.int16), torch.empty(0, dtype=torch.int64)
        self.num_tokens = 0
        Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        for result in self._results:
            shard = torch.frombuffer(bytearray(result), dtype=torch.int16)
            self._shards.append(shard)
            self.num_tokens += len(shard)

    def wait_for(self, tokens: int) -> None:
        """Until there is enough to begin with."""
        while self.num_tokens < tokens:
            time.sleep(0.1)
        self.grow()

    def grow(self) -> None:
        """Take what was made since the last call to the device."""
        if new := self._shards[:]:
            del self._shards[: len(new)]
            self.ids = torch.cat((self.ids.to(self._device), *(shard.to(self._device) for shard in new)))
            self.starts = (self.ids == self.bos).nonzero().flatten()

    def close(self) -> None:
        """End the processes."""
        self._pool.terminate()

    def draw(self, generator: torch.Generator, *, windows: int, length: int) -> Batch:
        """Random windows; each begins as a prompt does, with the start of a document."""
        chosen = torch.randint(len(self.starts), (windows, 1), generator=generator, device=self._device)
        places_BT = (self.starts[chosen] + torch.arange(length + 1, device=self._device)) % len(self.ids)
        rows_BT = self.ids[places_BT].long()
        return Batch(ids_BT=rows_BT[:, :-1], labels_BT=rows_BT[:, 1:])


def held_out(vocabulary_file: Path, *, documents: int, length: int) -> Batch:
    """Windows of documents that are in no shard, one after another."""
    ids = torch.frombuffer(
        bytearray(make_shard((str(vocabulary_file), HELD_OUT_SEED, documents))), dtype=torch.int16
    ).long()
    count = (len(ids) - 1) // length
    return Batch(
        ids_BT=ids[: count * length].view(count, length), labels_BT=ids[1 : count * length + 1].view(count, length)
    )
