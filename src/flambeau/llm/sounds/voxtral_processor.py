"""VoxtralProcessor: what stands for a sound in a prompt of Voxtral, and windows of its features.

transformers leaves the prompt to mistral-common; here it comes from tekken.json as that of texts does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flambeau.llm.images.pretrained_processor import OFFSETS
from flambeau.llm.text.tokenizer import Tokenizer, load_tokenizer

AUDIO, BEGIN = "[AUDIO]", "[BEGIN_AUDIO]"
WINDOW_FRAMES, FRAMES_PER_TOKEN = 3000, 8  # of features: a sound is filled up to whole windows of 30 s


class TokenNames:
    """Names of tokens, as a tokenizer of transformers gives them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)


class VoxtralProcessor:
    """Has the parts of a processor of transformers that sounds need."""

    audio_token = AUDIO

    def __init__(self, feature_extractor: Any, tokenizer: Tokenizer) -> None:
        self.feature_extractor = feature_extractor
        self.tokenizer = TokenNames(tokenizer)
        self._window: int = WINDOW_FRAMES * feature_extractor.hop_length  # samples

    def __call__(
        self, *, audio: Sequence[NDArray[np.float32]], sampling_rate: int, return_tensors: str = "pt", **options: Any
    ) -> dict[str, Any]:
        if options.get(f"return_{OFFSETS}"):
            return {OFFSETS: [[{"replacement": self._text(len(samples))} for samples in audio]]}
        windows = [self._windows(samples, sampling_rate, return_tensors) for samples in audio]
        return {"input_features": torch.cat(windows)}

    def _text(self, num_samples: int) -> str:
        num_windows = -(-num_samples // self._window)
        return BEGIN + AUDIO * (num_windows * WINDOW_FRAMES // FRAMES_PER_TOKEN)

    def _windows(self, samples: NDArray[np.float32], rate: int, kind: str) -> torch.Tensor:
        """[windows, features, frames]."""
        options = {"padding": True, "truncation": False, "pad_to_multiple_of": self._window, "return_tensors": kind}
        found: torch.Tensor = self.feature_extractor(samples, sampling_rate=rate, **options)["input_features"]
        return found.reshape(found.shape[1], -1, WINDOW_FRAMES).transpose(0, 1)


def read_voxtral_processor(folder: Path, feature_extractor: Any) -> VoxtralProcessor:
    return VoxtralProcessor(feature_extractor, load_tokenizer(folder))
