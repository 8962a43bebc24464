"""Small real tokenizers, trained in a moment."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

LINES = [
    "To be, or not to be, that is the question:",
    "Whether 'tis nobler in the mind to suffer",
    "The slings and arrows of outrageous fortune,",
    "Or to take arms against a sea of troubles",
    "And by opposing end them.  To die: to sleep;",
] * 8


@functools.cache
def sentencepiece_bytes(**options: Any) -> bytes:
    """A SentencePiece model with byte fallback, as Llama's: text survives it unchanged."""
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=written,
        vocab_size=400,
        model_type="bpe",
        hard_vocab_limit=False,
        minloglevel=2,
        **({"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True} | options),
    )
    return written.getvalue()


@functools.cache
def byte_level_json(special: tuple[str, ...] = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")) -> str:
    """A byte-level BPE tokenizer.json, as Llama 3's: "<|begin|>" comes before every prompt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens(["<tool call>"])
    begin = special[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    return str(tokenizer.to_str())


@functools.cache
def llama_json() -> str:
    """A tokenizer.json with SentencePiece's pieces and byte fallback, as Llama 2's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(LINES, BpeTrainer(vocab_size=500, special_tokens=names, show_progress=False))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = described["added_tokens"][:3]  # bytes are pieces, not special
    return json.dumps(described)


def write_sentencepiece(folder: Path, **options: Any) -> Path:
    """A folder with a tokenizer.model."""
    (folder / "tokenizer.model").write_bytes(sentencepiece_bytes(**options))
    return folder


def write_json_tokenizer(folder: Path, text: str, **settings: Any) -> Path:
    """A folder with a tokenizer.json and a tokenizer_config.json."""
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
