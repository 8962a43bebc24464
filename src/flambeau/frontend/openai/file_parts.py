"""Parts of chats that are images, videos or sounds, which are checked here."""

from __future__ import annotations

from typing import Any

from flambeau.errors import InvalidField
from flambeau.frontend.openai.fields import shown
from flambeau.serving.model_sources.urls import MAX_URL
from flambeau.wire.generation import EXAMPLES, MediaKind

Object = dict[str, Any]
KINDS: dict[str, MediaKind] = {  # by the type of a part; input_audio is OpenAI's, audio_url that of other servers
    "image_url": "image",
    "video_url": "video",
    "audio_url": "sound",
    "input_audio": "sound",
}
FIELDS = {"image_url": ("url", "detail"), "input_audio": ("data", "format")}
DETAILS = (None, "auto", "low", "high")  # without an effect: every image takes the same number of tokens
FORMATS = ("wav", "mp3", "flac", "ogg", "opus")
REMOTE = ("http://", "https://")


class FilePart(Object):
    """A part as chats have it that was another part in the client's request."""

    def __init__(self, part: Object, place: str) -> None:
        super().__init__(part)
        self.place = place


def image_part(url: str, place: str) -> FilePart:
    return FilePart({"type": "image_url", "image_url": {"url": url}}, place)


def is_file(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in KINDS


def check_file(part: Object, place: str) -> None:
    """Check a part of one of the types in KINDS."""
    name = part["type"]
    where, given = f"{place}.{name}", part.get(name)
    fields = FIELDS.get(name, ("url",))
    if "url" in fields and isinstance(given, str):
        given = {"url": given}
    if not isinstance(given, dict):
        needed = "a url" if "url" in fields else " and ".join(fields)
        raise InvalidField(where, f"{where} must be an object with {needed}")
    unknown = [*(part.keys() - {"type", name}), *(given.keys() - {*fields})]
    if unknown:
        raise InvalidField(f"{place}.{unknown[0]}", f"{place} has an unknown field {unknown[0][:100]!r}; leave it out")
    if "url" in fields:
        check_url(given.get("url"), f"{where}.url", KINDS[name])
    if "detail" in fields:
        check_detail(given.get("detail"), f"{where}.detail")
    if "data" in fields and (not isinstance(given.get("data"), str) or not given["data"]):
        raise InvalidField(f"{where}.data", f"{where}.data must be the file in base64")
    if "format" in fields and given.get("format") not in FORMATS:
        raise InvalidField(
            f"{where}.format", f"{where}.format must be one of {', '.join(FORMATS)}, not {shown(given.get('format'))}"
        )


def check_detail(detail: Any, place: str) -> None:
    if detail not in DETAILS:
        raise InvalidField(place, f"{place} must be auto, low or high, not {shown(detail)}")


def check_url(url: Any, place: str, kind: MediaKind = "image") -> str:
    if not isinstance(url, str) or not url.startswith(("data:", *REMOTE)):
        raise InvalidField(
            place, f"{place} must be a data URL ({EXAMPLES[kind]}) or begin with https://, not {shown(url)}"
        )
    if url.startswith(REMOTE) and len(url) > MAX_URL:
        raise InvalidField(place, f"{place} is an address of {len(url)} characters; it may have {MAX_URL}")
    if url.startswith("data:") and ";base64," not in url[:200]:
        raise InvalidField(place, f"{place} must have its data in base64: {EXAMPLES[kind]}")
    return url


def url_of(part: Object) -> str:
    """The address or the data URL of a part that was checked."""
    given = part[part["type"]]
    if part["type"] == "input_audio":
        return f"data:audio/{given['format']};base64,{given['data']}"
    return str(given if isinstance(given, str) else given["url"])
