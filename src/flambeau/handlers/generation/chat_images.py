"""ChatImages: the images and videos of a chat, as the model's prompt and its encoder need them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from flambeau.errors import HandlerError, InvalidField
from flambeau.handlers.generation.media_files import to_image, to_video
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.images.image_processor import FixedProcessor, ImageProcessor
from flambeau.llm.images.pretrained_processor import PretrainedProcessor
from flambeau.llm.images.pretrained_video_processor import PretrainedVideoProcessor
from flambeau.llm.images.video_files import VideoFile
from flambeau.llm.images.video_processor import VideoProcessor
from flambeau.llm.models.vision_architecture import ONE_IMAGE, PatchArchitecture, VisionArchitecture
from flambeau.llm.text.tokenizer import Tokenizer
from flambeau.wire.generation import MediaInput


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatVideos:
    """What stands for a video in a prompt."""

    marker: str  # what the chat template writes for it
    token: str  # the repeated one
    around: tuple[str, str]  # tokens before and behind an image
    processor: VideoProcessor

    def text(self, file: VideoFile) -> str:
        return self.processor.text_of(file, self.token, self.around)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatImages:
    """What stands for an image in a prompt: a text, in which a token is repeated."""

    marker: str  # what the chat template writes for an image
    token: str  # the repeated one
    around: tuple[str, str]  # what is written before and behind these, where the processor does not
    processor: ImageProcessor
    videos: ChatVideos | None = None  # None: the model reads none

    @classmethod
    def of(
        cls,
        arch: VisionArchitecture,
        processor: ImageProcessor,
        tokenizer: Tokenizer,
        videos: VideoProcessor | None = None,
    ) -> ChatImages:
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
        read = chat_videos(arch, videos, tokenizer, (names[0], names[-1]))
        if isinstance(processor, PretrainedProcessor):
            return cls(marker=processor.marker, token=token, around=("", ""), processor=processor, videos=read)
        if not arch.attends_both_ways:
            return cls(marker=token, token=token, around=("", ""), processor=processor, videos=read)
        return cls(marker=names[0], token=token, around=(f"\n\n{names[0]}", f"{names[-1]}\n\n"), processor=processor)

    def texts(self, images: Sequence[MediaInput]) -> list[str]:
        """What stands for each image and video. Raises InvalidField for one that cannot be read."""
        if isinstance(self.processor, PretrainedProcessor) and self.processor.reads_one and len(images) > 1:
            raise InvalidField(images[1].name, f"{images[1].name} is a second {images[1].kind}, and {ONE_IMAGE}")
        numbers = {"image": itertools.count(), "video": itertools.count()}
        return [self._text(image, next(numbers[image.kind])) for image in images]

    def expansions(self, images: Sequence[MediaInput], texts: Sequence[str]) -> dict[str, list[str]]:
        """The texts by what the chat template writes for them."""
        found: dict[str, list[str]] = {self.marker: []}
        for image, text in zip(images, texts, strict=True):
            marker = self.videos.marker if image.kind == "video" and self.videos is not None else self.marker
            found.setdefault(marker, []).append(text)
        return found

    def num_tokens(self, text: str) -> int:
        return sum(map(text.count, {self.token, *([self.videos.token] if self.videos is not None else [])}))

    def _text(self, image: MediaInput, number: int) -> str:
        if image.kind == "video":
            return self._video_text(image)
        before, behind = self.around
        if isinstance(self.processor, FixedProcessor):
            return before + self.token * self.processor.tokens + behind
        if not image.data and not image.url.startswith("data:"):
            raise InvalidField(
                image.name, f"{image.name}: how many tokens an image takes depends on its size; send it as a data URL"
            )
        try:
            if isinstance(self.processor, PretrainedProcessor):
                return self.processor.text_of(to_image(image), number)
            return before + self.token * self.processor.num_tokens(to_image(image)) + behind
        except InvalidRequest as error:
            raise InvalidField(image.name, str(error)) from None

    def _video_text(self, video: MediaInput) -> str:
        assert self.videos is not None  # others are refused before
        if not video.data and not video.url.startswith("data:"):
            raise InvalidField(
                video.name, f"{video.name}: how many tokens a video takes depends on its frames; send it as a data URL"
            )
        try:
            return self.videos.text(to_video(video))
        except InvalidRequest as error:
            raise InvalidField(video.name, str(error)) from None


def chat_videos(
    arch: VisionArchitecture, processor: VideoProcessor | None, tokenizer: Tokenizer, around: tuple[str, str]
) -> ChatVideos | None:
    """None: the model reads no videos, or its tokenizer has no token for them."""
    if processor is None:
        return None
    token = tokenizer.token_text(arch.token_of_videos)
    if tokenizer.named_id(token) != arch.token_of_videos:
        return None
    marker = processor.marker if isinstance(processor, PretrainedVideoProcessor) else token
    return ChatVideos(marker=marker, token=token, around=around, processor=processor)
