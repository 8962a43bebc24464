"""Byte-level vocabularies whose files have ranks of tokens and no merges: Mistral's tekken.json, and tiktoken's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flambeau.llm.errors import TokenizerError
from flambeau.llm.text.gguf_splits import SplitRule
from flambeau.llm.text.vocabulary import BYTE_OF_CHARACTER

CHARACTERS = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def ranked_tokenizer(
    ranks: Sequence[bytes], rule: SplitRule, *, special: Mapping[str, int], first_id: int, plain: Mapping[str, int]
) -> Any:
    """A tokenizer of the library for tokens in the order of their ranks; the first one has `first_id`.

    `special` are the ids of special tokens; `plain` those of other added tokens, whose names are found in any text.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    texts = ["".join(map(CHARACTERS.__getitem__, token)) for token in ranks]
    vocab = {text: first_id + rank for rank, text in enumerate(texts)}
    if len(vocab) != len(texts) or not vocab.keys() >= {*CHARACTERS.values()}:
        raise TokenizerError("its tokens are not different from each other, or lack some of the 256 bytes")
    named = {**special, **plain}
    if hidden := [name for name in named if vocab.get(name, named[name]) != named[name]]:
        raise TokenizerError(f"the names of its special tokens are also text: {', '.join(hidden[:5])}")
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, **named}, merges=merges_of(texts, vocab), ignore_merges=True))
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(step), "isolated") for step in rule.steps]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(name, special=name in special, normalized=False) for name in named])
    return tokenizer


def merges_of(texts: Sequence[str], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens that are a token together, by its rank: the pair with the lowest rank is merged first."""
    pairs = []
    for text in texts:
        for i in range(1, len(text)):
            left, right = text[:i], text[i:]
            if left in vocab and right in vocab:
                pairs.append((left, right))
    return pairs
