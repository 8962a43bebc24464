"""ChatFileReader: what stands for the images, videos and sounds of a chat in its prompt, within the model's context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flambeau.errors import InvalidField
from flambeau.handlers.generation.chat_images import ChatImages
from flambeau.handlers.generation.chat_sounds import ChatSounds
from flambeau.handlers.generation.media_files import media_kinds
from flambeau.llm.sounds.sound_clip import SoundClip
from flambeau.wire.generation import MediaInput, MediaKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFiles:
    """The images and videos of a chat in their order, which are decoded later, and its sounds in theirs."""

    images: Sequence[MediaInput] = ()
    sounds: Sequence[SoundClip] = ()
    kinds: Sequence[MediaKind] = ()  # of all of them, in the order of the chat

    @property
    def has_any(self) -> bool:
        return bool(self.images or self.sounds)

    def __str__(self) -> str:
        return counted(self.kinds)


NO_FILES = ChatFiles()


class ChatFileReader:
    """Reads the files of chats; raises InvalidField for those that the model does not read."""

    def __init__(self, images: ChatImages | None, sounds: ChatSounds | None, max_length: int) -> None:
        self._images, self._sounds, self._max_length = images, sounds, max_length  # None: the model reads none
        is_read = {
            "image": images is not None,
            "video": images is not None and images.videos is not None,
            "sound": sounds is not None,
        }
        self._kinds = {kind for kind, is_one in is_read.items() if is_one}

    def read(self, inputs: Sequence[MediaInput]) -> ChatFiles:
        """Sounds are decoded, as the prompt depends on their length."""
        for one in inputs:
            if one.kind not in self._kinds:
                raise InvalidField(one.name, f"{one.name} is {one.what}, but {not_read(one.kind)}")
        sounds = [one for one in inputs if one.kind == "sound"]
        return ChatFiles(
            images=[one for one in inputs if one.kind != "sound"],
            sounds=self._sounds.read(sounds) if self._sounds is not None else (),
            kinds=[one.kind for one in inputs],
        )

    def expansions(self, messages: Sequence[Mapping[str, Any]], files: ChatFiles) -> dict[str, list[str]]:
        """The texts of files, by what the chat template writes in their places; empty without any."""
        places = media_kinds(messages)
        for kind in places:
            if kind not in self._kinds:
                raise InvalidField("messages", f"the messages have {kind}s: {not_read(kind)}")
        if places != [*files.kinds]:
            raise InvalidField("messages", f"the messages have places for {counted(places)}, and the request {files}")
        found: dict[str, list[str]] = {}
        num_tokens = self.num_sound_tokens(files)
        if not places:
            return found
        if self._images is not None:
            texts = self._images.texts(files.images)
            found |= self._images.expansions(files.images, texts)
            num_tokens += sum(map(self._images.num_tokens, texts))
        if self._sounds is not None:
            found[self._sounds.marker] = [*map(self._sounds.text_of, files.sounds)]
        if num_tokens >= self._max_length:  # before their tokens are put into a prompt
            raise InvalidField(
                "messages",
                f"{files} take {num_tokens} tokens, and the model's context has only {self._max_length}; send fewer or "
                "smaller ones",
            )
        return found

    def num_sound_tokens(self, files: ChatFiles) -> int:
        return sum(map(self._sounds.num_tokens, files.sounds)) if self._sounds is not None else 0


def not_read(kind: MediaKind) -> str:
    return f"this model reads no {kind}s; leave {kind}s out, or use a model that reads them"


def counted(kinds: Iterable[MediaKind]) -> str:
    """How many there are of each kind, such as `2 images and 1 sound`."""
    numbers = Counter(kinds).items()
    return " and ".join(f"{number} {kind}{'s' if number > 1 else ''}" for kind, number in numbers) or "none"
