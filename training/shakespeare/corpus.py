"""The text: its vocabulary, the part that is held out, and windows of tokens to learn from.

Shapes: B windows · T tokens
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
import torch
from torch import Tensor

HELD_OUT = 0.1  # of the text, at its end
IGNORED = -100  # a label nothing is learnt from
CHAT_SHARE = 0.15  # of the windows are conversations, every turn of which ends with EOS


def train_vocabulary(text: str, file: Path, *, size: int) -> None:
    """Write a SentencePiece model that spells every text, line ends and runs of spaces included."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        character_coverage=1.0,
        user_defined_symbols=["\n", "\n\n"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,  # a prompt's first word is spelt as at the start of any line
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        minloglevel=2,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(model.getvalue())


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Windows of tokens, and for each token the one that follows."""

    ids_BT: Tensor
    labels_BT: Tensor


class Corpus:
    """The tokens of a text, of which the end is held out."""

    def __init__(self, text: str, vocabulary: sentencepiece.SentencePieceProcessor) -> None:
        cut = split_at(text)
        self.characters_held_out = len(text) - cut
        self.bos, self.eos = vocabulary.bos_id(), vocabulary.eos_id()
        self.ids = torch.tensor(vocabulary.encode(text[:cut]))
        self.held_out_ids = torch.tensor(vocabulary.encode(text[cut:]))
        newlines = torch.tensor([vocabulary.piece_to_id(piece) for piece in ("\n", "\n\n")])
        self.line_starts = torch.isin(self.ids, newlines).nonzero().flatten() + 1
        self.speeches = [[*vocabulary.encode(speech), self.eos] for speech in text[:cut].strip().split("\n\n")]

    def draw(self, generator: torch.Generator, *, windows: int, length: int) -> Batch:
        """Random windows; each begins as a prompt does, with BOS and the start of a line."""
        rows = [self._draw_row(generator, length) for _ in range(windows)]
        return Batch(
            ids_BT=torch.stack([ids for ids, _ in rows]), labels_BT=torch.stack([labels for _, labels in rows])
        )

    def _draw_row(self, generator: torch.Generator, length: int) -> tuple[Tensor, Tensor]:
        if torch.rand((), generator=generator) < CHAT_SHARE:
            return self._draw_conversation(generator, length)
        starts = self.line_starts[self.line_starts <= len(self.ids) - length]
        start = int(starts[torch.randint(len(starts), (), generator=generator)])
        row = torch.cat((torch.tensor([self.bos]), self.ids[start : start + length]))
        return row[:-1], row[1:]

    def _draw_conversation(self, generator: torch.Generator, length: int) -> tuple[Tensor, Tensor]:
        at = int(torch.randint(len(self.speeches) - length // 4, (), generator=generator))
        row, first_end = [self.bos], len(self.speeches[at])
        while len(row) <= length:
            row += self.speeches[at % len(self.speeches)]
            at += 1
        labels = torch.tensor(row[1 : length + 1])
        # Nothing tells yet that this is a conversation: a plain text must not learn to end after its first speech.
        labels[first_end - 1 : first_end] = IGNORED
        return torch.tensor(row[:length]), labels

    def held_out(self, *, length: int, every: int = 1) -> Batch:
        """The held-out text in windows (or one of several of them), each with BOS before it."""
        count = len(self.held_out_ids) // length
        labels_BT = self.held_out_ids[: count * length].view(count, length)[::every]
        begin_B1 = torch.full((len(labels_BT), 1), self.bos)
        return Batch(ids_BT=torch.cat((begin_B1, labels_BT[:, :-1]), dim=1), labels_BT=labels_BT)


def split_at(text: str) -> int:
    """Where the held-out part begins: at the start of a speech."""
    return text.index("\n\n", int(len(text) * (1 - HELD_OUT))) + 2
