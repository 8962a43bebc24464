"""GridVideoProcessor: the frames of a video → patches, as transformers' Qwen2VLVideoProcessor and Qwen3VL's do.

Two frames side by side in time are one step. Frames are resized in 8 bits, by PyTorch.

Shapes: F frames · H height · W width
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.errors import CheckpointError, InvalidRequest
from flambeau.llm.images.frame_sampler import FrameSampler
from flambeau.llm.images.grid_processor import MAX_RATIO, fitted, patches_of, read_limits, sides_of
from flambeau.llm.images.image_processor import COMMON, SETTINGS, Colors, checked_settings, read_settings
from flambeau.llm.images.video_files import VideoFacts, VideoFile, facts_of, frames_at
from flambeau.llm.images.video_processor import MAX_STEP_PATCHES, ReadVideo
from flambeau.llm.json_files import read_object
from flambeau.llm.models.vision_architecture import GridArchitecture, VideoTimes

VIDEO_SETTINGS = "video_preprocessor_config.json"
FILTERS = {2: "bilinear", 3: "bicubic"}  # by Pillow's numbers
FRAME_RATE = 2.0  # frames a second that are read, where the files do not say it: the rate of the models' authors
MAX_SAMPLED_BYTES = 1 << 30  # of the resized frames of a video
MAX_SHARE, MIN_SHARE = 0.9, 1.05  # of the pixels of all frames for one video; of the fewest pixels for a frame
_COMMON: dict[str, Any] = {**COMMON, "resample": 3, "merge_size": 2, "temporal_patch_size": 2}
_FRAMES: dict[str, Any] = {"min_frames": 4, "max_frames": 768, "cap_pixels_per_frame": False}
DEFAULTS: dict[bool, dict[str, Any]] = {  # by whether times are written in texts (Qwen3-VL)
    False: {
        **_COMMON,
        **_FRAMES,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": 14,
        "do_sample_frames": False,
        "max_video_tokens": 128_000,
    },
    True: {
        **_COMMON,
        **_FRAMES,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": 16,
        "do_sample_frames": True,
        "max_video_tokens": 768,
    },
}
SUPPORTED = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True)
OTHERS = ("fps", "num_frames", "min_pixels", "max_pixels", "video_processor_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class GridVideoProcessor:
    """Samples frames, and resizes them so that whole tokens cover them."""

    times: VideoTimes
    steps_per_second: int
    patch_size: int
    frames: int  # of a step
    merge_size: int
    min_pixels: int  # of a frame; where times are in texts, of the whole video
    max_pixels: int
    has_cap: bool  # a frame gets its share of the pixels of all
    max_tokens: int  # where it does: of a video, or with times in texts of a frame
    filter: str
    colors: Colors
    sampling: FrameSampler

    @property
    def key(self) -> str:
        return repr(self)

    @property
    def token_side(self) -> int:
        """The pixels of a side of a token."""
        return self.patch_size * self.merge_size

    def read(self, file: VideoFile, is_cancelled: Callable[[], bool] = lambda: False) -> ReadVideo:
        facts = facts_of(file)
        places = self.places(file, facts)
        height, width = self.resized(file, facts, len(places))
        of_place = {
            place: self.resize(frame, (height, width))
            for place, frame in zip(sorted({*places}), frames_at(file, facts, {*places}, is_cancelled), strict=False)
        }  # not all of them only if it is cancelled
        frames = [of_place[place] for place in places if place in of_place]
        frames += frames[-1:] * (-len(frames) % self.frames)
        grid = height // self.patch_size, width // self.patch_size
        tokens = grid[0] // self.merge_size, grid[1] // self.merge_size
        num_steps = len(frames) // self.frames
        in_texts = self.times == "texts"
        return ReadVideo(
            pixels=partial(self.patches, frames, max(1, MAX_STEP_PATCHES // (grid[0] * grid[1]))),
            num_tokens=num_steps * tokens[0] * tokens[1],
            grid=grid,
            token_grid=tokens,
            times=(0,) if in_texts else self.positions(facts, places, num_steps),
            num_places=num_steps if in_texts else 1,
        )

    def text_of(self, file: VideoFile, token: str, around: tuple[str, str]) -> str:
        facts = facts_of(file)
        places = self.places(file, facts)
        height, width = self.resized(file, facts, len(places))
        step = token * (height * width // self.token_side**2)
        num_steps = -(-len(places) // self.frames)
        if self.times != "texts":
            return step * num_steps
        begin, end = around
        return "".join(f"<{time:.1f} seconds>{begin}{step}{end}" for time in self.seconds(facts, places))

    def places(self, file: VideoFile, facts: VideoFacts) -> list[int]:
        """The frames that are read."""
        if not facts.is_sampled and facts.num_frames < self.sampling.multiple:
            raise InvalidRequest(
                f"{file.name} is a video of {facts.num_frames} frames; send at least {self.sampling.multiple}",
                file.name,
            )
        if facts.is_sampled and facts.num_frames > self.sampling.max_frames:
            raise InvalidRequest(
                f"{file.name} is a video of {facts.num_frames} frames; send at most {self.sampling.max_frames}",
                file.name,
            )
        return self.sampling.places(facts)

    def seconds(self, facts: VideoFacts, places: list[int]) -> list[float]:
        """The time of each step: halfway between its first and its last frame."""
        padded = [*places, *places[-1:] * (-len(places) % self.frames)]
        times = [place / facts.rate for place in padded]
        return [(times[i] + times[i + self.frames - 1]) / 2 for i in range(0, len(times), self.frames)]

    def positions(self, facts: VideoFacts, places: list[int], num_steps: int) -> tuple[int, ...]:
        """What the first position of each step adds."""
        if self.times == "steps":
            return tuple(range(num_steps))
        rate = len(places) / facts.num_frames * facts.rate
        interval = self.steps_per_second * torch.tensor(self.frames / rate)
        return tuple((torch.arange(num_steps) * interval).long().tolist())

    def resized(self, file: VideoFile, facts: VideoFacts, num_frames: int) -> tuple[int, int]:
        """Height and width that frames are resized to. Raises InvalidRequest for those that are too narrow."""
        size, side = facts.size, self.token_side
        if max(size) > MAX_RATIO * min(size):
            raise InvalidRequest(
                f"{file.name} is a video of {size[1]} x {size[0]} pixels, and one side may be at most {MAX_RATIO} "
                "times as long as the other; cut it",
                file.name,
            )
        if self.times == "texts":
            found = self._fitted_together(size, num_frames)
        else:
            found = fitted(size, side, self.min_pixels, self._max_pixels(num_frames))
        if found[0] * found[1] * 3 * num_frames > MAX_SAMPLED_BYTES:
            raise InvalidRequest(
                f"{file.name} is a video of which {num_frames} frames of {found[1]} x {found[0]} pixels would be read; "
                "send a shorter or smaller one, or lower the limits of the number of pixels in the model's files",
                file.name,
            )
        return found

    def _max_pixels(self, num_frames: int) -> int:
        """Of a frame."""
        if not self.has_cap:
            return self.max_pixels
        every = int(self.max_tokens * self.token_side**2 * MAX_SHARE)
        return max(min(self.max_pixels, every * self.frames // num_frames), int(self.min_pixels * MIN_SHARE))

    def _fitted_together(self, size: tuple[int, int], num_frames: int) -> tuple[int, int]:
        """With limits of the pixels of all frames."""
        side, most = self.token_side, self.max_pixels
        if self.has_cap:
            share = min(self.max_tokens * side * side, most // num_frames)
            most = max(share, int(self.min_pixels * MIN_SHARE)) * num_frames
        if min(size) < side:
            scale = max(side / size[0], side / size[1])
            size = int(size[0] * scale), int(size[1] * scale)
        rounded = round(num_frames / self.frames) * self.frames
        return fitted(size, side, self.min_pixels, most, num_frames=num_frames, rounded_frames=rounded)

    def resize(self, frame_HW3: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
        if frame_HW3.shape[:2] == size:
            return frame_HW3
        image = torch.from_numpy(np.ascontiguousarray(frame_HW3)).permute(2, 0, 1).unsqueeze(0).contiguous()
        resized = F.interpolate(image, size=size, mode=self.filter, align_corners=False, antialias=True)
        found: NDArray[np.uint8] = resized[0].permute(1, 2, 0).numpy()
        return found

    def patches(self, frames: list[NDArray[np.uint8]], num_steps: int) -> Iterator[Tensor]:
        """The patches of so many steps at a time."""
        number = num_steps * self.frames
        for first in range(0, len(frames), number):
            scaled = np.stack([self.colors.scaled(frame) for frame in frames[first : first + number]])
            yield patches_of(scaled, self.frames, self.patch_size, self.merge_size)


def read_grid_video_processor(folder: Path, arch: GridArchitecture) -> GridVideoProcessor:
    """The processor of a checkpoint; raises CheckpointError for settings that it does not know."""
    in_texts = arch.video_times == "texts"
    name, own = read_video_settings(folder)
    supported = {**SUPPORTED, "do_sample_frames": True} if in_texts else SUPPORTED
    given = checked_settings(folder, DEFAULTS[in_texts], supported, OTHERS, own, name)
    for key, value in sides_of(arch).items():
        if given[key] != value:
            raise CheckpointError(f"{name} has {key} {given[key]!r}, and the network {value}")
    if given["resample"] not in FILTERS:
        raise CheckpointError(
            f"{name}: resample must be one of {', '.join(map(str, FILTERS))}, not {given['resample']!r}"
        )
    limits = read_limits({**given, "size": {**DEFAULTS[in_texts]["size"], **given["size"]}})
    return GridVideoProcessor(
        times=arch.video_times,
        steps_per_second=arch.steps_per_second,
        patch_size=arch.patch_size,
        frames=arch.frames,
        merge_size=arch.merge_size,
        min_pixels=limits["shortest_edge"],
        max_pixels=limits["longest_edge"],
        has_cap=bool(given["cap_pixels_per_frame"]),
        max_tokens=positive(name, "max_video_tokens", given["max_video_tokens"]),
        filter=FILTERS[given["resample"]],
        colors=Colors.of(given),
        sampling=read_sampling(name, given, arch.frames, in_texts=in_texts),
    )


def read_sampling(name: str, given: Mapping[str, Any], frames: int, *, in_texts: bool) -> FrameSampler:
    rate, number = given.get("fps"), given.get("num_frames")
    if rate is not None and number is not None:
        raise CheckpointError(f"{name} has both fps {rate!r} and num_frames {number!r}; remove one of them")
    if rate is not None and (not isinstance(rate, int | float) or rate <= 0):
        raise CheckpointError(f"{name}: fps must be a number of frames a second, not {rate!r}")
    multiple = 1 if in_texts else frames
    return FrameSampler(
        spread="ends" if in_texts else "parts",
        num_frames=None if number is None else positive(name, "num_frames", number, least=multiple),
        rate=FRAME_RATE if rate is None else float(rate),
        min_frames=positive(name, "min_frames", given["min_frames"], least=multiple),
        max_frames=positive(name, "max_frames", given["max_frames"], least=multiple),
        multiple=multiple,
    )


def positive(name: str, key: str, value: Any, *, least: int = 1) -> int:
    if not isinstance(value, int) or value < least:
        raise CheckpointError(f"{name}: {key} must be a whole number from {least}, not {value!r}")
    return value


def read_video_settings(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """The name of the file that has settings of videos, and these: in the order that transformers looks."""
    newer = folder / "processor_config.json"
    if newer.is_file():
        section = read_object(newer, CheckpointError).get("video_processor")
        if isinstance(section, Mapping):
            return newer.name, section
    if (folder / VIDEO_SETTINGS).is_file():
        return VIDEO_SETTINGS, read_object(folder / VIDEO_SETTINGS, CheckpointError)
    return SETTINGS, read_settings(folder)
