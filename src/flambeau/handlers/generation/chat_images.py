"""ChatImages: the images of a chat, as the model's prompt and its encoder need them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flambeau.errors import HandlerError, InvalidField
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.images.image_files import MAX_BYTES, ImageFile
from flambeau.llm.images.image_processor import FixedProcessor, ImageProcessor
from flambeau.llm.models.vision_architecture import VisionArchitecture
from flambeau.llm.text.chat_template import IMAGE_PART
from flambeau.llm.text.tokenizer import Tokenizer
from flambeau.wire.generation import ImageInput

TEXT_ONLY = "this model reads text only; leave images out, or use a model that reads them"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatImages:
    """What stands for an image in a prompt: some text, and a token that is repeated."""

    expansions: Mapping[str, str]  # what the chat template writes for an image, and what replaces it
    image_id: int
    processor: ImageProcessor

    @classmethod
    def of(cls, arch: VisionArchitecture, processor: ImageProcessor, tokenizer: Tokenizer) -> ChatImages:
        """Gemma's template writes the token before an image; blank lines are around it. Qwen's writes all three."""
        ids = arch.begin_id, arch.image_id, arch.end_id
        begin, image, end = names = [tokenizer.token_text(token) for token in ids]
        if tuple(map(tokenizer.named_id, names)) != ids:
            raise HandlerError(
                f"config.json has the tokens {', '.join(map(str, ids))} for images, which are no special tokens of the "
                "tokenizer; use the files that came with the checkpoint"
            )
        expansions = {begin: f"\n\n{begin}{image}{end}\n\n"} if arch.attends_both_ways else {}
        return cls(expansions=expansions, image_id=arch.image_id, processor=processor)

    def counts(self, images: Sequence[ImageInput]) -> list[int]:
        """How many tokens each image takes. Raises InvalidField for one that cannot be read."""
        return [self._count(image) for image in images]

    def _count(self, image: ImageInput) -> int:
        if isinstance(self.processor, FixedProcessor):
            return self.processor.tokens
        if not image.data and not image.url.startswith("data:"):
            raise InvalidField(
                image.name, f"{image.name}: how many tokens an image takes depends on its size; send it as a data URL"
            )
        try:
            return self.processor.num_tokens(to_file(image))
        except InvalidRequest as error:
            raise InvalidField(image.name, str(error)) from None

    def expand(self, ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """The prompt with all tokens of its images. Raises InvalidField unless the template has shown every image."""
        places = [place for place, token in enumerate(ids) if token == self.image_id]
        if len(places) != len(counts):
            raise InvalidField(
                "messages",
                f"the model's chat template shows {len(places)} of the {len(counts)} images in the messages",
            )
        expanded: list[int] = []
        first = 0
        for place, count in zip(places, counts, strict=True):
            expanded += [*ids[first:place], *[self.image_id] * count]
            first = place + 1
        return [*expanded, *ids[first:]]


def num_image_parts(messages: Sequence[Mapping[str, Any]]) -> int:
    contents = [message.get("content") for message in messages]
    return sum(part == IMAGE_PART for content in contents if isinstance(content, list) for part in content)


def to_file(image: ImageInput) -> ImageFile:
    """The file in a data URL, or the one that the server has fetched."""
    if image.data:
        return ImageFile(data=image.data, name=image.name)
    head, comma, text = image.url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64") or not comma:
        raise InvalidField(image.name, f"{image.name} must be a data URL, such as data:image/png;base64,…")
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise InvalidField(image.name, f"{image.name} is an image of more than {MAX_BYTES} bytes; send a smaller one")
    try:
        return ImageFile(data=base64.b64decode(text, validate=True), name=image.name)
    except (binascii.Error, ValueError):
        raise InvalidField(image.name, f"{image.name} is not valid base64; encode the bytes of the file") from None
