"""`flambeau llm quantize`: writes a quantized checkpoint and measures its perplexity."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from flambeau.cli.options import check_checkpoint, checkpoint_folder
from flambeau.errors import ConfigError

KINDS = ("int8", "int4", "fp8")
FORMATS = ("flambeau", "compressed-tensors")
KEPT_SHARE = 10  # without a text for the perplexity, this part of the calibration text is kept for it: a tenth


def quantize(
    checkpoint: Path,
    into: Path,
    kind: str,
    *,
    group_size: int,
    text: Path | None,
    calibrate: Path | None = None,
    form: str = "flambeau",
) -> None:
    """Write the quantized checkpoint; print its size, and with a text its perplexity, before and after."""
    check_options(kind, form, calibrate)
    content = None if text is None else read_text(text)
    sample = None if calibrate is None else read_text(calibrate, "--calibrate")
    check_checkpoint(checkpoint)
    checkpoint = checkpoint_folder(checkpoint)
    if sample is not None and content is None:
        sample, content = kept_apart(sample)
    try:  # torch takes a second: what is wrong with the options is known before
        from flambeau.llm.calibration import calibrated_weights
        from flambeau.llm.checkpoints.quantized import WrittenFormat, save_quantized
        from flambeau.llm.config import Quantization
        from flambeau.llm.errors import LLMError
        from flambeau.llm.perplexity import perplexity_of
    except ImportError as error:
        raise ConfigError(f"quantizing needs {error.name}: pip install 'flambeau[llm]'") from None
    try:
        weights = None if sample is None else calibrated_weights(checkpoint, sample, form, group_size)
        kinds = cast("Quantization", kind), cast("WrittenFormat", form)
        save_quantized(checkpoint, into, kinds[0], group_size=group_size, form=kinds[1], calibrated=weights)
        print(f"{into}: {size_mb(into):.1f} MB, from {size_mb(checkpoint):.1f} MB")
        if content is not None:
            after, before = perplexity_of(into, content), perplexity_of(checkpoint, content)
            source = text or f"the last tenth of {calibrate}"
            print(f"perplexity on {source}: {after:.3f}, from {before:.3f}")
    except LLMError as error:
        raise ConfigError(str(error)) from error


def check_options(kind: str, form: str, calibrate: Path | None) -> None:
    if kind not in KINDS:
        raise ConfigError(f"--kind may be {', '.join(KINDS)}, not {kind!r}")
    if form not in FORMATS:
        raise ConfigError(f"--format may be {' or '.join(FORMATS)}, not {form!r}")
    if calibrate is not None and kind != "int4":
        raise ConfigError(f"--calibrate is for --kind int4; {kind} needs no calibration, leave it out")


def kept_apart(text: str) -> tuple[str, str]:
    """A text without its last tenth, and that."""
    at = len(text) - len(text) // KEPT_SHARE
    return text[:at], text[at:]


def read_text(path: Path, option: str = "--text") -> str:
    """Read a text; called before the long work, so that errors come first."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not content.strip():
        raise ConfigError(f"{option} {path} is empty; use a text of a few thousand words")
    return content


def size_mb(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) / 1e6
