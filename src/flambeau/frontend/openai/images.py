"""Images in chats: parts are checked here; their files are decoded by the worker, or fetched by the server."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flambeau.errors import DownloadFailed, InvalidField
from flambeau.frontend.openai.fields import shown
from flambeau.serving.model import Model
from flambeau.serving.model_sources.downloader import IMAGE_LIMITS, Downloader
from flambeau.wire.generation import ImageInput

Object = dict[str, Any]
ABILITY = "vision"
MAX_IMAGES = 128  # of one request
PLACE = {"type": "image"}  # what is left of an image in the messages, for the chat template
DETAILS = (None, "auto", "low", "high")  # without an effect: every image takes the same number of tokens
REMOTE = ("http://", "https://")


class ImagePart(Object):
    """A part of the type image_url, as chats have it, that was another part in the client's request."""

    def __init__(self, url: str, place: str) -> None:
        super().__init__(type="image_url", image_url={"url": url})
        self.place = place


def is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def check_image(part: Object, place: str) -> None:
    """Check a part of the type image_url."""
    image = part.get("image_url")
    given = {"url": image} if isinstance(image, str) else image
    if not isinstance(given, dict):
        raise InvalidField(f"{place}.image_url", f"{place}.image_url must be an object with a url")
    check_url(given.get("url"), f"{place}.image_url.url")
    if given.get("detail") not in DETAILS:
        where = f"{place}.image_url.detail"
        raise InvalidField(where, f"{where} must be auto, low or high, not {shown(given['detail'])}")
    unknown = [*(part.keys() - {"type", "image_url"}), *(given.keys() - {"url", "detail"})]
    if unknown:
        raise InvalidField(f"{place}.{unknown[0]}", f"{place} has an unknown field {unknown[0][:100]!r}; leave it out")


def check_url(url: Any, place: str) -> str:
    if not isinstance(url, str) or not url.startswith(("data:", *REMOTE)):
        raise InvalidField(
            place, f"{place} must be a data URL (data:image/png;base64,…) or begin with https://, not {shown(url)}"
        )
    if url.startswith("data:") and ";base64," not in url[:200]:
        raise InvalidField(place, f"{place} must have its data in base64: data:image/png;base64,…")
    return url


def url_of(part: Object) -> str:
    image = part["image_url"]
    return str(image if isinstance(image, str) else image["url"])


def take_images(messages: Sequence[Object]) -> tuple[list[Object], list[ImageInput]]:
    """The messages with only places for images, and the images; the messages were checked before."""
    images: list[ImageInput] = []
    kept = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(map(is_image, content)):
            for j, part in enumerate(content):
                if is_image(part):
                    place = part.place if isinstance(part, ImagePart) else f"messages[{i}].content[{j}]"
                    images.append(ImageInput(place, url_of(part)))
            message = {**message, "content": [PLACE if is_image(part) else part for part in content]}
        kept.append(message)
    if len(images) > MAX_IMAGES:
        raise InvalidField(images[-1].name, f"the request has {len(images)} images; send at most {MAX_IMAGES}")
    return kept, images


def check_reads_images(model: Model, images: Sequence[ImageInput]) -> None:
    """Raise if there are images and the model reads text only; what it reads is unknown until a worker has loaded."""
    if images and model.pool.has_loaded and ABILITY not in model.abilities:
        name = images[0].name
        raise InvalidField(
            name, f"{name} is an image, and the model {model.name!r} reads text only; use a model that reads images"
        )


# ---- remote images ----


def is_remote(image: ImageInput) -> bool:
    return image.url.startswith(REMOTE) and not image.data


async def fetch_images(images: Sequence[ImageInput], downloader: Downloader) -> list[ImageInput]:
    """The same images with the files of remote ones. Raises InvalidField, which tells nothing of the other server."""
    for image in images:
        if is_remote(image) and not is_allowed(image.url, downloader):
            raise InvalidField(
                image.name,
                f"{image.name}: this server does not fetch images from that address; send the image as a data URL, or "
                "add the address to the server's allowed_urls",
            )
    return [await fetch_image(image, downloader) if is_remote(image) else image for image in images]


def is_allowed(url: str, downloader: Downloader) -> bool:
    try:
        return downloader.allows(url)
    except DownloadFailed:
        return False


async def fetch_image(image: ImageInput, downloader: Downloader) -> ImageInput:
    with tempfile.TemporaryDirectory(prefix="flambeau-image-") as folder:
        try:
            file = await downloader.download(image.url, Path(folder))
        except DownloadFailed:
            raise InvalidField(
                image.name,
                f"{image.name} could not be fetched: it must be the public address of a file of at most "
                f"{IMAGE_LIMITS.max_bytes >> 20} MB that arrives within {IMAGE_LIMITS.total_s:g} s; or send the image "
                "as a data URL",
            ) from None
        data = await asyncio.to_thread(file.read_bytes)
    return ImageInput(image.name, image.url, data)
