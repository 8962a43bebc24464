"""SoundClipEncoder: sounds → the embeddings that stand for them in a prompt, kept by their samples.

Shapes: N tokens of a sound · X the decoder's hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flambeau.llm.core.sequence import EncodedMedia
from flambeau.llm.errors import LLMError
from flambeau.llm.images.image_encoder import DEVICE_ERRORS, FeatureCache, encode_missing, own_stream
from flambeau.llm.sounds.pretrained_sounds import PretrainedSounds
from flambeau.llm.sounds.sound_clip import SoundClip
from flambeau.llm.sounds.sound_processor import FAILURES, SoundProcessor, not_read


class SoundClipEncoder:
    """Encodes sounds; embeddings are kept on the host."""

    def __init__(self, network: PretrainedSounds, processor: SoundProcessor, cache: FeatureCache) -> None:
        self.arch = network.arch
        self.cache = cache
        self.processor = processor
        self._network = network
        weight = next(network.parameters())
        self._device, self._dtype = weight.device, weight.dtype

    def encode(
        self, sounds: Sequence[SoundClip], is_cancelled: Callable[[], bool] = lambda: False
    ) -> list[EncodedMedia]:
        """Raises InvalidRequest, which names the sound that cannot be read."""
        return encode_missing([(sound.digest, sound) for sound in sounds], self.cache, self._encode, is_cancelled)

    @torch.inference_mode()
    def _encode(self, digest: bytes, sound: SoundClip) -> EncodedMedia:
        inputs = self.processor.inputs_of(sound)
        with own_stream(self._device):
            moved = {
                name: one.to(self._device, self._dtype if one.is_floating_point() else None)
                for name, one in inputs.items()
            }
            try:
                features: Tensor = self._network.encode(moved).cpu()
            except FAILURES as error:
                if isinstance(error, DEVICE_ERRORS):
                    raise
                raise not_read(sound, error) from error
        if (expected := self.processor.num_tokens(sound)) != len(features):
            raise LLMError(
                f"a sound has {expected} tokens by its processor and {len(features)} by its encoder; the settings of "
                "the processor and config.json do not belong together: copy them again"
            )
        return EncodedMedia(digest, features, kind="sound")
