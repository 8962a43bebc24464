"""`flambeau llm quantize`: writes a quantized checkpoint and measures its perplexity."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from flambeau.cli.options import check_checkpoint, checkpoint_folder
from flambeau.errors import ConfigError

KINDS = ("int8", "int4", "fp8")


def quantize(checkpoint: Path, into: Path, kind: str, *, group_size: int, text: Path | None) -> None:
    """Write the quantized checkpoint; print its size, and with `text` its perplexity, before and after."""
    if kind not in KINDS:
        raise ConfigError(f"--kind may be {', '.join(KINDS)}, not {kind!r}")
    try:
        from flambeau.llm.checkpoints.quantized import save_quantized
        from flambeau.llm.config import Quantization
        from flambeau.llm.errors import LLMError
        from flambeau.llm.perplexity import perplexity_of
    except ImportError as error:
        raise ConfigError(f"quantizing needs {error.name}: pip install 'flambeau[llm]'") from None
    content = None if text is None else read_text(text)
    check_checkpoint(checkpoint)
    checkpoint = checkpoint_folder(checkpoint)
    try:
        save_quantized(checkpoint, into, cast("Quantization", kind), group_size=group_size)
        print(f"{into}: {size_mb(into):.1f} MB, from {size_mb(checkpoint):.1f} MB")
        if content is not None:
            after, before = perplexity_of(into, content), perplexity_of(checkpoint, content)
            print(f"perplexity on {text}: {after:.3f}, from {before:.3f}")
    except LLMError as error:
        raise ConfigError(str(error)) from error


def read_text(path: Path) -> str:
    """Read the text for the perplexity; called before the long work, so that errors come first."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not content.strip():
        raise ConfigError(f"--text {path} is empty; use a text of a few thousand words")
    return content


def size_mb(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) / 1e6
