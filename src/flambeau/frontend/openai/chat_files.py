"""Images, videos and sounds in chats: their files are decoded by the worker; remote ones are fetched here."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flambeau.errors import DownloadFailed, InvalidField
from flambeau.frontend.openai.file_parts import KINDS, REMOTE, FilePart, is_file, url_of
from flambeau.serving.model import Model
from flambeau.serving.model_sources.downloader import Downloader
from flambeau.wire.generation import MediaInput, MediaKind

Object = dict[str, Any]
ABILITIES: dict[MediaKind, str] = {"image": "vision", "video": "video", "sound": "audio"}  # that a model needs
MOST: dict[MediaKind, int] = {"image": 128, "video": 8, "sound": 128}  # of one request
MAX_FETCHED_BYTES = 200 << 20  # of all remote files of a request: a few bytes of it name each
PLACES: dict[MediaKind, Object] = {  # what is left of a file in the messages, for the chat template
    "image": {"type": "image"},
    "video": {"type": "video"},
    "sound": {"type": "audio"},
}


def take_files(messages: Sequence[Object]) -> tuple[list[Object], list[MediaInput]]:
    """The messages with only places for files, and these; the messages were checked before."""
    files: list[MediaInput] = []
    kept = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(map(is_file, content)):
            taken = [file_of(part, f"messages[{i}].content[{j}]") for j, part in enumerate(content)]
            files += [file for file in taken if file is not None]
            parts = [part if file is None else PLACES[file.kind] for part, file in zip(content, taken, strict=True)]
            message = {**message, "content": parts}
        kept.append(message)
    for kind, most in MOST.items():
        own = [file for file in files if file.kind == kind]
        if len(own) > most:
            raise InvalidField(own[-1].name, f"the request has {len(own)} {kind}s; send at most {most}")
    return kept, files


def file_of(part: Object, place: str) -> MediaInput | None:
    """The file of a part; None: it is text."""
    if not is_file(part):
        return None
    name = part.place if isinstance(part, FilePart) else place
    return MediaInput(name, url_of(part), kind=KINDS[part["type"]])


def check_reads(model: Model, files: Sequence[MediaInput]) -> None:
    """Raise for a file of a kind that the model does not read, which is known once a worker has loaded."""
    for file in files if model.pool.has_loaded else ():
        if ABILITIES[file.kind] not in model.abilities:
            raise InvalidField(
                file.name,
                f"{file.name} is {file.what}, and the model {model.name!r} reads no {file.kind}s; use a model "
                f"that reads {file.kind}s (if it should read them, its log says why not)",
            )


# ---- remote files ----


def is_remote(file: MediaInput) -> bool:
    return file.url.startswith(REMOTE) and not file.data


async def fetch_files(files: Sequence[MediaInput], downloaders: Mapping[str, Downloader]) -> list[MediaInput]:
    """The same files with what remote ones hold. Raises InvalidField, which tells nothing of the other server."""
    await asyncio.to_thread(check_addresses, files, downloaders)  # many long ones take a while
    left_bytes = MAX_FETCHED_BYTES
    found = []
    for file in files:
        if is_remote(file):
            file = await fetch_file(file, downloaders[file.kind])
            left_bytes -= len(file.data)
            if left_bytes < 0:
                raise InvalidField(
                    file.name,
                    f"{file.name}: with it, the files that the server fetches for this request have more than "
                    f"{MAX_FETCHED_BYTES >> 20} MB; send fewer or smaller ones",
                )
        found.append(file)
    return found


def check_addresses(files: Sequence[MediaInput], downloaders: Mapping[str, Downloader]) -> None:
    """Raise InvalidField for a remote file whose address is not allowed."""
    for file in files:
        if is_remote(file) and not is_allowed(file.url, downloaders[file.kind]):
            raise InvalidField(
                file.name,
                f"{file.name}: this server does not fetch {file.kind}s from that address; send the {file.kind} as a "
                "data URL, or add the address to the server's allowed_urls",
            )


def is_allowed(url: str, downloader: Downloader) -> bool:
    try:
        return downloader.allows(url)
    except DownloadFailed:
        return False


async def fetch_file(file: MediaInput, downloader: Downloader) -> MediaInput:
    limits = downloader.limits
    with tempfile.TemporaryDirectory(prefix=f"flambeau-{file.kind}-") as folder:
        try:
            fetched = await downloader.download(file.url, Path(folder))
        except DownloadFailed:
            raise InvalidField(
                file.name,
                f"{file.name} could not be fetched: it must be the public address of a file of at most "
                f"{limits.max_bytes >> 20} MB that arrives within {limits.total_s:g} s; or send the {file.kind} as a "
                "data URL",
            ) from None
        data = await asyncio.to_thread(fetched.read_bytes)
    return msgspec.structs.replace(file, data=data)
