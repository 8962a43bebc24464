"""PretrainedSounds: what an extractor made of a sound → embeddings, by an encoder of transformers.

Shapes: N tokens of a sound · X the decoder's hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.images.pretrained_encoder import load_without
from flambeau.llm.models.sound_architecture import SoundArchitecture
from flambeau.llm.models.vision_architecture import TOKEN_IDS
from flambeau.llm.sounds.sound_processor import import_sounds

NOT_ENCODERS = (
    *("language_model", "text_model", "lm_head"),
    *("vision_tower", "embed_vision", "vision_embedder", "visual"),
)  # parts of a model that read no sounds
Inputs = Mapping[str, Tensor]


class PretrainedSounds:
    """The parts of a model of transformers that encode sounds."""

    def __init__(self, model: Any, arch: SoundArchitecture) -> None:
        self.arch = arch
        self._model = model
        self._encode = OWN_WAYS.get(arch.reader.model_type, by_model)

    def encode(self, inputs: Inputs) -> Tensor:
        """[N, X]."""
        given = dict(inputs)
        token_ids = given.pop(TOKEN_IDS, None)
        embedded = self._encode(self._model, given)
        if token_ids is None:
            return embedded
        is_sound = token_ids == self.arch.sound_id
        if int(is_sound.sum()) != len(embedded):
            return embedded  # of another length than the text: the encoder's caller reports it
        rows = embedded.new_empty(len(token_ids), embedded.shape[-1])
        rows[is_sound] = embedded
        rows[~is_sound] = self._model.embed_audio(input_ids=token_ids[~is_sound][None])[0]
        return rows

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        found: Iterator[nn.Parameter] = self._model.parameters(recurse)
        return found


def by_model(model: Any, inputs: Inputs) -> Tensor:
    """What `get_audio_features` gives: only frames of the sound, or all of them with a mask."""
    found = model.get_audio_features(**inputs)
    features: Tensor = found.pooler_output
    if features.dim() == 2:
        return features
    return features[found.attention_mask.to(features.device)]


def qwen_2_audio(model: Any, inputs: Inputs) -> Tensor:
    """Frames of the padding behind the sound are masked in the encoder, and left out then."""
    features, mask = inputs["input_features"], inputs["feature_attention_mask"]
    tower = model.audio_tower
    num_frames, num_tokens = tower._get_feat_extract_output_lengths(mask.sum(-1))
    is_real = torch.arange((features.shape[-1] - 2) // 2 + 1, device=features.device) < num_frames[:, None]
    hidden = features.new_zeros(*is_real.shape, 1)
    attention_mask = tower_mask(tower, hidden, is_real)
    found = tower(features, attention_mask=attention_mask).last_hidden_state
    projected: Tensor = model.multi_modal_projector(found)
    return projected[0, : int(num_tokens)]


def tower_mask(tower: Any, hidden: Tensor, is_real: Tensor) -> Any:
    from transformers.masking_utils import create_bidirectional_mask

    return create_bidirectional_mask(config=tower.config, inputs_embeds=hidden, attention_mask=is_real.long())


def gemma_3n(model: Any, inputs: Inputs) -> Tensor:
    """As many embeddings for every sound: those of the padding are that of the last token of the vocabulary."""
    found = model.get_audio_features(inputs["input_features"], ~inputs["input_features_mask"])
    last = torch.tensor([[model.vocab_size - 1]], device=found.pooler_output.device)
    padding = model.embed_audio(input_ids=last)[0]
    features = torch.where(found.audio_mel_mask[0, :, None], padding, found.pooler_output[0])
    missing = model.config.audio_soft_tokens_per_image - len(features)
    return torch.cat((features, padding.expand(max(0, missing), -1)))


OWN_WAYS: dict[str, Callable[[Any, Inputs], Tensor]] = {"qwen2_audio": qwen_2_audio, "gemma3n": gemma_3n}


def load_pretrained_sounds(
    folder: Path, arch: SoundArchitecture, *, device: torch.device, dtype: torch.dtype
) -> PretrainedSounds:
    """The encoder, ready to run; raises CheckpointError if transformers cannot load all of it."""
    transformers = import_sounds(arch)
    model, _ = load_without(
        folder, arch.reader.class_name, NOT_ENCODERS, transformers, device=device, dtype=dtype, setting="read_sounds"
    )
    return PretrainedSounds(model, arch)
