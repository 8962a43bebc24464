"""`flambeau llm quantize`: a checkpoint with smaller weights, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from flambeau.cli.checkpoints import check, folder_of
from flambeau.errors import ConfigError

KINDS = ("int8", "int4", "fp8")


def quantize(checkpoint: Path, into: Path, kind: str, *, group_size: int, text: Path | None) -> None:
    """Write the checkpoint anew; tell its size, and its perplexity on a text, before and after."""
    if kind not in KINDS:
        raise ConfigError(f"--kind may be {', '.join(KINDS)}, not {kind!r}")
    try:
        from flambeau.llm.config import Quantization
        from flambeau.llm.errors import LLMError
        from flambeau.llm.perplexity import perplexity_of
        from flambeau.llm.checkpoints.quantized import save_quantized
    except ImportError as error:
        raise ConfigError(f"quantizing needs {error.name}: pip install 'flambeau[llm]'") from None
    words = None if text is None else words_in(text)
    check(checkpoint)
    checkpoint = folder_of(checkpoint)
    try:
        save_quantized(checkpoint, into, cast("Quantization", kind), group_size=group_size)
        print(f"{into}: {size_mb(into):.1f} MB, from {size_mb(checkpoint):.1f} MB")
        if words is not None:
            print(
                f"perplexity on {text}: {perplexity_of(into, words):.3f}, from {perplexity_of(checkpoint, words):.3f}"
            )
    except LLMError as error:
        raise ConfigError(str(error)) from error


def words_in(text: Path) -> str:
    """A text to measure with; one that cannot be read is refused before the work is done."""
    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {text} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not words.strip():
        raise ConfigError(f"--text {text} is empty; a few thousand words tell most")
    return words


def size_mb(folder: Path) -> float:
    """What the files of a folder take."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) / 1e6
