"""VideoProcessor: the file of a video → its sampled frames, resized, and the text that stands for it in a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from flambeau.llm.images.video_files import VideoFile

MAX_STEP_PATCHES = 16_384  # that are encoded at a time, unless a single step of a video has more


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadVideo:
    """A video as its encoder takes it: frames in 8 bits until their pixels are asked for."""

    pixels: Callable[[], Iterator[Tensor]]  # of some steps at a time
    num_tokens: int
    grid: tuple[int, int] | None = None  # rows and columns of patches of a step
    token_grid: tuple[int, int] | None = None  # … and of tokens, where these are positions
    times: tuple[int, ...] = (0,)  # what the first position of each step adds
    num_places: int = 1  # spans of tokens in its text
    more: Mapping[str, Any] = field(default_factory=dict)  # what an encoder of transformers takes besides


class VideoProcessor(Protocol):
    """Reads the files of videos."""

    @property
    def key(self) -> str:
        """Its settings, which tell the embeddings of a file from those with other settings."""

    def read(self, file: VideoFile, is_cancelled: Callable[[], bool] = lambda: False) -> ReadVideo:
        """Raises InvalidRequest for a file that is not a video, or not one that is read."""

    def text_of(self, file: VideoFile, token: str, around: tuple[str, str]) -> str:
        """What stands for it in a prompt, by tokens of videos and those around an image; one frame is decoded."""
