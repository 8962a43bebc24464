"""SoundArchitecture: what the engine has to know of an encoder of sounds, from config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flambeau.llm.models.families.sound_readers import SoundReader
from flambeau.llm.models.vision_config import whole_number

# In names of weights of an encoder of sounds.
SOUNDS = re.compile(r"(^|\.)(audio_tower|embed_audio|sound_encoder|sound_projection)\b")
SOUND_KEYS = ("audio_token_id", "audio_token_index")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundArchitecture:
    """An encoder of transformers, which that package builds from config.json."""

    reader: SoundReader
    sound_id: int  # the token in the places of a sound
    more_ids: tuple[int, ...] = ()  # tokens of its text that are embedded by the encoder, too

    @property
    def ids(self) -> frozenset[int]:
        """The tokens whose embeddings the encoder gives."""
        return frozenset((self.sound_id, *self.more_ids))


def read_sounds(reader: SoundReader, config: Mapping[str, Any]) -> SoundArchitecture | None:
    """The encoder of sounds; None: the model has none."""
    if reader.is_optional and config.get("audio_config") is None:
        return None
    named = next((key for key in SOUND_KEYS if config.get(key) is not None), None)
    more: tuple[int, ...] = ()
    if reader.more_ids:
        given = config.get(reader.more_ids)
        more = (reader.more_default if given is None else whole_number(reader.more_ids, given),)
    return SoundArchitecture(
        reader=reader,
        sound_id=reader.sound_id if named is None else whole_number(named, config[named]),
        more_ids=more,
    )
