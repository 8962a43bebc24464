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
from flambeau.llm.images.pretrained_processor import PretrainedProcessor
from flambeau.llm.models.vision_architecture import ONE_IMAGE, PatchArchitecture, VisionArchitecture
from flambeau.llm.text.chat_template import IMAGE_PART
from flambeau.llm.text.tokenizer import Tokenizer
from flambeau.wire.generation import ImageInput

TEXT_ONLY = "this model reads text only; leave images out, or use a model that reads them"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatImages:
    """What stands for an image in a prompt: a text, in which a token is repeated."""

    marker: str  # what the chat template writes for an image
    token: str  # the repeated one
    around: tuple[str, str]  # what is written before and behind these, where the processor does not
    processor: ImageProcessor

    @classmethod
    def of(cls, arch: VisionArchitecture, processor: ImageProcessor, tokenizer: Tokenizer) -> ChatImages:
        """Gemma's template writes the token before an image; blank lines are around it. Qwen's writes all three."""
        ids = [arch.image_id]
        if isinstance(arch, PatchArchitecture):
            ids = [arch.begin_id, arch.image_id, arch.end_id]
        names = [tokenizer.token_text(one) for one in ids]
        if [*map(tokenizer.named_id, names)] != ids:
            raise HandlerError(
                f"config.json has the tokens {', '.join(map(str, ids))} for images, which are no special tokens of the "
                "tokenizer; use the files that came with the checkpoint"
            )
        token = names[len(names) // 2]
        if isinstance(processor, PretrainedProcessor):
            return cls(marker=processor.marker, token=token, around=("", ""), processor=processor)
        if not arch.attends_both_ways:
            return cls(marker=token, token=token, around=("", ""), processor=processor)
        return cls(marker=names[0], token=token, around=(f"\n\n{names[0]}", f"{names[-1]}\n\n"), processor=processor)

    def texts(self, images: Sequence[ImageInput]) -> list[str]:
        """What stands for each image. Raises InvalidField for one that cannot be read."""
        if isinstance(self.processor, PretrainedProcessor) and self.processor.reads_one and len(images) > 1:
            raise InvalidField(images[1].name, f"{images[1].name} is a second image, and {ONE_IMAGE}")
        return [self._text(image, number) for number, image in enumerate(images)]

    def num_tokens(self, text: str) -> int:
        return text.count(self.token)

    def _text(self, image: ImageInput, number: int) -> str:
        before, behind = self.around
        if isinstance(self.processor, FixedProcessor):
            return before + self.token * self.processor.tokens + behind
        if not image.data and not image.url.startswith("data:"):
            raise InvalidField(
                image.name, f"{image.name}: how many tokens an image takes depends on its size; send it as a data URL"
            )
        try:
            if isinstance(self.processor, PretrainedProcessor):
                return self.processor.text_of(to_file(image), number)
            return before + self.token * self.processor.num_tokens(to_file(image)) + behind
        except InvalidRequest as error:
            raise InvalidField(image.name, str(error)) from None


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
