"""Runtime: loads the parts of a Hugging Face folder onto the worker's device, without running the folder's own code."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flambeau.errors import HandlerError
from flambeau.handlers.loaders.torch_compile import compile_model

logger = logging.getLogger(__name__)

INSTALL = "pip install 'flambeau[transformers]'"
# Weights that a checkpoint may lack: they serve training, or nothing that a task reads.
SPARE = ("pooler.", "masked_spec_embed", "position_ids")
SAFE = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Where the files are, and where and how the network computes."""

    folder: Path
    device: torch.device
    dtype: torch.dtype | None = None  # None: float32 on a CPU, else that of the checkpoint
    compile_options: Mapping[str, Any] | None = None
    max_tokens: int = 4096  # of one call, padding included
    max_new_tokens: int = 1024  # a request may not generate more
    ranking: Mapping[str, Any] = field(default_factory=dict)  # how a language model ranks texts, as the settings say

    def load_model(self, auto_class: str, *, generates: bool = False, config: Mapping[str, Any] | None = None) -> Any:
        """The network with all its weights; safetensors if there are any, else pickles, with weights only.

        `config` replaces config.json.
        """
        library = import_transformers()
        dtype: Any = self.dtype or (torch.float32 if self.device.type == "cpu" else "auto")
        with readable_errors(self.folder):
            model, info = getattr(library, auto_class).from_pretrained(
                self.folder,
                dtype=dtype,
                weights_only=True,
                output_loading_info=True,
                **({} if config is None else {"config": library.AutoConfig.for_model(**config)}),
                ignore_mismatched_sizes=True,  # `_check` rejects them by name; the library's own error names none
                **SAFE,
            )
        self._check(auto_class, info)
        model = model.to(self.device).eval().requires_grad_(False)
        if self.compile_options is not None:
            if generates:
                logger.warning("compile has no effect on tasks that generate text: their shapes change at every step")
            else:
                model = compile_model(model, dict(self.compile_options))
        return model

    def load_part(self, auto_class: str) -> Any:
        """The tokenizer, image processor or feature extractor."""
        library = import_transformers()
        with readable_errors(self.folder):
            return getattr(library, auto_class).from_pretrained(self.folder, **SAFE)

    def _check(self, auto_class: str, info: Mapping[str, Any]) -> None:
        lacking = sorted(name for name in info["missing_keys"] if not any(spare in name for spare in SPARE))
        if lacking:
            shown = ", ".join(lacking[:3]) + (", …" if len(lacking) > 3 else "")
            raise HandlerError(
                f"the weights in {self.folder.name} lack {shown}, so that {auto_class} would answer at random: the "
                "model was not trained for this task; choose another task in model-config.yaml, or another checkpoint"
            )
        if info["mismatched_keys"]:
            raise HandlerError(
                f"weights in {self.folder.name} do not fit config.json: {next(iter(info['mismatched_keys']))}"
            )


def import_transformers() -> Any:
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise HandlerError(f"the transformers handler needs transformers ({error}): {INSTALL}") from None
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


@contextmanager
def readable_errors(folder: Path) -> Iterator[None]:
    """Turn what transformers raises for a folder into one sentence with the remedy."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:
        raise HandlerError(f"{folder.name} needs a package that is not installed: {first_line(error)}") from error
    except (ValueError, OSError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        text = first_line(error)
        if "trust_remote_code" in str(error):
            text = (
                "its config.json asks for Python code of the repository (auto_map), which is not run: "
                "trust_remote_code is off. Write a handler.py of your own that imports this code if you trust it"
            )
        raise HandlerError(f"{folder.name} could not be loaded: {text}") from error


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:500]}" if lines else type(error).__name__
