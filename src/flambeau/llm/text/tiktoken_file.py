"""Kimi's tiktoken.model: a vocabulary by ranks, whose rules to split text are those of the class in the settings."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.llm.errors import TokenizerError
from flambeau.llm.text.gguf_splits import KIMI_K2
from flambeau.llm.text.ranked_vocabulary import ranked_tokenizer
from flambeau.llm.text.tokenizer_files import TIKTOKEN_CLASS, added_tokens, named_tokens
from flambeau.llm.text.vocabulary import TokenizersVocabulary

NUM_RESERVED = 256  # ids behind the ranks, of which tokenizer_config.json names some


def read_tiktoken(file: Path, settings: Mapping[str, Any]) -> TokenizersVocabulary:
    """The vocabulary of a file with a token in base64 and its rank on each line."""
    if (named := settings.get("tokenizer_class")) != TIKTOKEN_CLASS:
        raise TokenizerError(
            f"{file} has no rules to split text: they are those of the class in the tokenizer_config.json beside it, "
            f"which names {named}, and only {TIKTOKEN_CLASS} is known; put the tokenizer.json of the same model there"
        )
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = [base64.b64decode(token, validate=True) for token, _ in sorted(lines, key=lambda line: int(line[1]))]
        if [int(rank) for _, rank in lines] != [*range(len(lines))]:
            raise ValueError("its ranks are not 0, 1, 2, …")
        declared = added_tokens(file.parent, settings)
        names = {token.token_id: name for name, token in declared.items()}
        last = max(len(ranks) + NUM_RESERVED, *(i + 1 for i in names), 0) if names else len(ranks) + NUM_RESERVED
        whole = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), last)}
        plain = {name: whole[name] for name, token in declared.items() if not token.is_special}
        special = {name: i for name, i in whole.items() if name not in plain}
        tokenizer = ranked_tokenizer(ranks, KIMI_K2, special=special, first_id=0, plain=plain)
    except ImportError as error:
        raise TokenizerError(f"{file} needs tokenizers: pip install flambeau[llm]") from error
    except (KeyError, ValueError, TokenizerError) as error:
        raise TokenizerError(
            f"{file} cannot be used: {error}; put the tokenizer.json of the same model there"
        ) from None
    return TokenizersVocabulary(tokenizer, named_tokens(settings))
