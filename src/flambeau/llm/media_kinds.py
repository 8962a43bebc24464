"""The kinds of files in chats, and what chat templates know as their places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

MediaKind = Literal["image", "video", "sound"]
PLACES: Mapping[MediaKind, Mapping[str, str]] = {
    "image": {"type": "image"},
    "video": {"type": "video"},
    "sound": {"type": "audio"},
}
