"""The files of images, videos and sounds in a chat, from data URLs or as the server has fetched them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from flambeau.errors import InvalidField
from flambeau.llm.images import video_files
from flambeau.llm.images.image_files import MAX_BYTES, ImageFile
from flambeau.llm.images.video_files import MAX_FRAMES, VideoFile
from flambeau.llm.media_kinds import PLACES
from flambeau.wire.generation import EXAMPLES, MediaInput, MediaKind

FRAMES = "data:video/jpeg;base64"
LARGEST: dict[MediaKind, int] = {"image": MAX_BYTES, "video": video_files.MAX_BYTES, "sound": MAX_BYTES}


def media_kinds(messages: Sequence[Mapping[str, Any]]) -> list[MediaKind]:
    """The places of files in the messages, in their order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [kind for part in parts for kind, place in PLACES.items() if part == place]


def to_file(given: MediaInput) -> ImageFile | VideoFile:
    return to_video(given) if given.kind == "video" else to_image(given)


def to_image(image: MediaInput) -> ImageFile:
    return ImageFile(data=bytes_of(image), name=image.name)


def to_video(video: MediaInput) -> VideoFile:
    """The file of a video, or its frames, one after another in a data URL."""
    if not video.data and video.url[: len(FRAMES) + 1].lower() == f"{FRAMES},":
        texts = data_text(video)
        if (number := texts.count(",") + 1) > MAX_FRAMES:
            raise InvalidField(video.name, f"{video.name} is a video of {number} frames; send fewer")
        return VideoFile(frames=tuple(decoded(one, video.name) for one in texts.split(",")), name=video.name)
    return VideoFile(data=bytes_of(video), name=video.name)


def bytes_of(given: MediaInput) -> bytes:
    """What a file holds. Raises InvalidField for an input that has none, or too long a one."""
    return given.data or decoded(data_text(given), given.name)


def data_text(given: MediaInput) -> str:
    """What is behind the comma of a data URL."""
    head, comma, text = given.url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64") or not comma:
        raise InvalidField(given.name, f"{given.name} must be a data URL, such as {EXAMPLES[given.kind]}")
    most = LARGEST[given.kind]
    if len(text) > most * 4 // 3 + 4:
        raise InvalidField(given.name, f"{given.name} is {given.what} of more than {most} bytes; send a smaller one")
    return text


def decoded(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidField(name, f"{name} is not valid base64; encode the bytes of the file") from None
