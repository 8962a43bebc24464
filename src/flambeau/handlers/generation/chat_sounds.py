"""ChatSounds: the sounds of a chat, as the model's prompt and its encoder need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flambeau.errors import BadRequest, HandlerError, InvalidField
from flambeau.handlers.generation.media_files import bytes_of
from flambeau.handlers.pretrained.audio import LongSound, read_audio
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.models.sound_architecture import SoundArchitecture
from flambeau.llm.sounds.sound_clip import LONGEST_S, SoundClip, too_long
from flambeau.llm.sounds.sound_processor import SoundProcessor
from flambeau.llm.text.tokenizer import Tokenizer
from flambeau.wire.generation import MediaInput

ONE_SOUND = "this model reads one sound in a chat; send one, or join them to one file"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSounds:
    """What stands for a sound in a prompt: a text, in which a token is repeated."""

    processor: SoundProcessor

    @classmethod
    def of(cls, arch: SoundArchitecture, processor: SoundProcessor, tokenizer: Tokenizer) -> ChatSounds:
        name = tokenizer.token_text(arch.sound_id)
        if tokenizer.named_id(name) != arch.sound_id:
            raise HandlerError(
                f"config.json has the token {arch.sound_id} for sounds, which is no special token of the tokenizer; "
                "use the files that came with the checkpoint"
            )
        return cls(processor=processor)

    @property
    def marker(self) -> str:
        """What the chat template writes for a sound."""
        return self.processor.marker

    def read(self, inputs: Sequence[MediaInput]) -> list[SoundClip]:
        """The samples of each sound, at the model's rate. Raises InvalidField for one that cannot be read."""
        if self.processor.reads_one and len(inputs) > 1:
            raise InvalidField(inputs[1].name, f"{inputs[1].name} is a second sound, and {ONE_SOUND}")
        sounds: list[SoundClip] = []
        left_s = LONGEST_S
        for one in inputs:
            sound = self._read(one, left_s)
            left_s = max(0.0, left_s - sound.length_s)
            sounds.append(sound)
        return sounds

    def _read(self, given: MediaInput, left_s: float) -> SoundClip:
        rate, data, longest_s = self.processor.rate, bytes_of(given), self.processor.longest_s
        try:
            samples = read_audio(data, rate, longest_s=min(left_s, longest_s), is_whole=True)
        except BadRequest as error:
            reason = str(error)
            if isinstance(error, LongSound) and left_s < longest_s:
                reason = (
                    f"the sounds of a request may have {LONGEST_S:g} s in all, of which {left_s:.1f} s are left for "
                    "it; send fewer, or shorter ones"
                )
            raise InvalidField(given.name, f"{given.name}: {reason}") from None
        sound = SoundClip(samples=samples, rate=rate, name=given.name)
        if sound.length_s > longest_s:
            raise InvalidField(given.name, str(too_long(given.name, sound.length_s, longest_s)))
        return sound

    def text_of(self, sound: SoundClip) -> str:
        """What stands for a sound. Raises InvalidField if the model does not read it."""
        try:
            return self.processor.text_of(sound)
        except InvalidRequest as error:
            raise InvalidField(sound.name, str(error)) from None

    def num_tokens(self, sound: SoundClip) -> int:
        return sum(map(self.text_of(sound).count, self.processor.tokens))
