"""ChatImages: the images of a chat, as the model's prompt and its encoder need them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flambeau.errors import HandlerError, InvalidField
from flambeau.llm.images.image_processor import MAX_BYTES, ImageFile
from flambeau.llm.models.architecture import VisionArchitecture
from flambeau.llm.text.chat_template import IMAGE_PART
from flambeau.llm.text.tokenizer import Tokenizer
from flambeau.wire.generation import ImageInput

TEXT_ONLY = "this model reads text only; leave images out, or use a model that reads them"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatImages:
    """What stands for an image in a prompt: some text, and a token repeated."""

    expansions: Mapping[str, str]  # what the chat template writes for an image, and what replaces it
    image_id: int
    num_tokens: int

    @classmethod
    def of(cls, arch: VisionArchitecture, tokenizer: Tokenizer) -> ChatImages:
        """Gemma has blank lines around an image."""
        ids = arch.begin_id, arch.image_id, arch.end_id
        begin, image, end = names = [tokenizer.token_text(token) for token in ids]
        expansion = f"\n\n{begin}{image * arch.num_tokens}{end}\n\n"
        if tuple(map(tokenizer.named_id, names)) != ids:
            raise HandlerError(
                f"config.json has the tokens {', '.join(map(str, ids))} for images, which are no special tokens of the "
                "tokenizer; use the files that came with the checkpoint"
            )
        return cls(expansions={begin: expansion}, image_id=arch.image_id, num_tokens=arch.num_tokens)

    def check_prompt(self, ids: Sequence[int], num_images: int) -> None:
        """Raise unless the template has shown every image."""
        num_shown = ids.count(self.image_id) // self.num_tokens
        if num_shown != num_images:
            raise InvalidField(
                "messages", f"the model's chat template shows {num_shown} of the {num_images} images in the messages"
            )


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
