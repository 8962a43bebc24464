"""PretrainedVideoProcessor: a video → what an encoder of transformers takes, and the text that stands for it.

The processor of transformers chooses the frames, resizes them and writes the text. The text is asked for with frames
that have a shape and no content, before any is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.errors import CheckpointError, InvalidRequest
from flambeau.llm.images.pretrained_processor import OFFSETS, class_name, import_images, make_processor
from flambeau.llm.images.video_files import VideoFacts, VideoFile, facts_of, frames_at
from flambeau.llm.images.video_processor import ReadVideo
from flambeau.llm.models.vision_architecture import IS_VIDEO, PretrainedVision
from flambeau.llm.transformers_package import first_lines, quiet

MAX_FRAMES = 768  # of those that come as images
MAX_BYTES = 1 << 30  # of decoded frames
NUM_TEXTS = 64  # that are kept
TRIAL = VideoFacts(num_frames=64, rate=8.0, size=(48, 64))  # is read when a model is loaded


class PretrainedVideoProcessor:
    """Reads videos with a processor of transformers."""

    def __init__(self, processor: Any, arch: PretrainedVision) -> None:
        assert arch.reader.videos is not None, "the class reads no videos"
        self._processor, self._arch, self._reader = processor, arch, arch.reader.videos
        self._videos = processor.video_processor
        self.marker: str = processor.video_token
        self.key = f"{type(self._videos).__name__} {self._videos.to_json_string()}"
        self._text = lru_cache(NUM_TEXTS)(self._make_text)

    def read(self, file: VideoFile, is_cancelled: Callable[[], bool] = lambda: False) -> ReadVideo:
        facts = facts_of(file)
        places = self.places(file, facts)
        with named(file, facts):
            of_place = dict(zip(sorted({*places}), frames_at(file, facts, {*places}, is_cancelled), strict=False))
            if is_cancelled():
                return ReadVideo(pixels=lambda: iter(()), num_tokens=0)
            frames = np.stack([of_place[place] for place in places])
            found = self._run(torch.from_numpy(frames).permute(0, 3, 1, 2), facts, places, return_tensors="pt")
            times = self._times(found)
        pixels = found[self._reader.pixels]
        text = self._text(facts, places)
        if not self._arch.reader.has_grid:
            return ReadVideo(pixels=lambda: iter((pixels,)), num_tokens=self.num_tokens(text), more=self._inputs(found))
        num_steps, rows, columns = found["video_grid_thw"][0].tolist()
        side = self._videos.merge_size
        return ReadVideo(
            pixels=lambda: iter((pixels,)),
            num_tokens=self.num_tokens(text),
            token_grid=(rows // side, columns // side),
            times=times,
            num_places=num_steps if self._arch.steps_per_second is None else 1,
            more=self._inputs(found),
        )

    def _times(self, found: Any) -> tuple[int, ...]:
        """What the first position of each step adds, where positions grow with seconds."""
        if self._arch.steps_per_second is None:
            return (0,)
        between = int(float(found["video_second_per_grid"][0]) * self._arch.steps_per_second)
        return tuple(step * between for step in range(int(found["video_grid_thw"][0, 0])))

    def _rate(self, facts: VideoFacts) -> float:
        """How many frames a second are read, where times are positions."""
        own = self._videos.fps or self._reader.rate
        assert own is not None, "the row names a rate"
        return facts.rate if facts.is_sampled else float(own)

    def _check_times(self) -> None:
        """Raise for settings with which positions of frames are not those of transformers."""
        if self._videos.num_frames is not None:
            raise ValueError("num_frames is not supported, as times of frames are positions; set fps instead")
        if getattr(self._processor, "load_audio_from_video", False):
            raise ValueError("load_audio_from_video is not supported; send the sound of a video as a sound")
        assert self._arch.steps_per_second is not None
        between = self._videos.temporal_patch_size / self._rate(TRIAL) * self._arch.steps_per_second
        if between < 1 or not float(between).is_integer():
            raise ValueError(f"positions of frames would be {between:g} apart; fps has to make it a whole number")

    def text_of(self, file: VideoFile, token: str, around: tuple[str, str]) -> str:
        facts = facts_of(file)
        places = self.places(file, facts)
        with named(file, facts):
            return self._text(facts, places)

    def num_tokens(self, text: str) -> int:
        return text.count(self.token)

    @property
    def token(self) -> str:
        """The one that is repeated in the text of a video."""
        return str(self._processor.tokenizer.convert_ids_to_tokens(self._arch.token_of_videos))

    def places(self, file: VideoFile, facts: VideoFacts) -> tuple[int, ...]:
        """The frames that are read, in their order."""
        with named(file, facts):
            found = tuple(range(facts.num_frames)) if facts.is_sampled else self._sampled(facts)
        height, width = facts.size
        if (facts.is_sampled and len(found) > MAX_FRAMES) or len(found) * height * width * 3 > MAX_BYTES:
            raise InvalidRequest(
                f"{file.name} is a video of which {len(found)} frames of {width} x {height} pixels would be read; send "
                "a shorter or smaller one",
                file.name,
            )
        return found

    def _sampled(self, facts: VideoFacts) -> tuple[int, ...]:
        options = {name: getattr(self._videos, name, None) for name in self._videos.valid_kwargs.__annotations__}
        if self._arch.steps_per_second is not None:
            options["fps"] = self._rate(facts)
        elif options.get("num_frames") is None and options.get("fps") is None:
            options |= {"num_frames": self._reader.num_frames, "fps": self._reader.rate}
        try:
            found = self._videos.sample_frames(metadata=self._metadata(facts), **options)
        except ValueError:  # of more frames than there are
            if (options.get("num_frames") or 0) <= facts.num_frames:
                raise
            found = self._videos.sample_frames(
                metadata=self._metadata(facts), **{**options, "num_frames": facts.num_frames}
            )
        return tuple(int(place) for place in found)

    def _metadata(self, facts: VideoFacts, places: tuple[int, ...] | None = None) -> Any:
        from transformers.video_utils import VideoMetadata

        return VideoMetadata(
            total_num_frames=facts.num_frames,
            fps=facts.rate,
            height=facts.size[0],
            width=facts.size[1],
            duration=facts.num_frames / facts.rate,
            frames_indices=None if places is None else [*places],
        )

    def _make_text(self, facts: VideoFacts, places: tuple[int, ...]) -> str:
        device = "cpu" if self._reader.counts_in_arrays else "meta"
        blank = torch.zeros(len(places), 3, *facts.size, dtype=torch.uint8, device=device)
        [found] = self._run(blank, facts, places, return_tensors="pt", **{f"return_{OFFSETS}": True})[OFFSETS]
        [replaced] = found
        return str(replaced["replacement"])

    def _run(self, frames: Tensor, facts: VideoFacts, places: tuple[int, ...], **options: Any) -> Any:
        if self._arch.steps_per_second is not None:
            options["fps"] = self._rate(facts)
        with torch.inference_mode(), quiet():
            return self._processor(
                text=[self.marker],
                videos=[[frames]],
                video_metadata=[self._metadata(facts, places)],
                do_sample_frames=False,
                input_data_format="channels_first",
                return_mm_token_type_ids=False,
                **options,
            )

    def _inputs(self, found: Any) -> dict[str, Any]:
        return {IS_VIDEO: True, **{name: found[name] for name in self._reader.inputs if name in found}}

    def try_out(self) -> None:
        """Write the text of a trial video; raises if settings are missing, or are those of another model."""
        if self._arch.steps_per_second is not None:
            self._check_times()
        text = self._make_text(TRIAL, self._sampled(TRIAL))
        if self.token not in text:
            raise ValueError(f"the processor writes no {self.token} for a video, but {text[:100]}")


@contextmanager
def named(file: VideoFile, facts: VideoFacts) -> Iterator[None]:
    """Raise InvalidRequest for a video that the processor does not take, such as one of a few pixels."""
    try:
        yield
    except (IndexError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InvalidRequest(
            f"{file.name} is a video of {facts.num_frames} frames of {facts.size[1]} x {facts.size[0]} pixels, which "
            f"the model cannot read: {first_lines(error)}; send one of another size or length",
            file.name,
        ) from None


def read_pretrained_video_processor(folder: Path, arch: PretrainedVision) -> PretrainedVideoProcessor:
    """Raises CheckpointError for files that do not describe a processor, or one that was not compared."""
    reader = arch.reader.videos
    assert reader is not None, "the class reads no videos"
    transformers = import_images(arch)
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet():
            videos = transformers.AutoVideoProcessor.from_pretrained(folder, **options)
            if type(videos).__name__ != reader.processor:
                raise CheckpointError(f"it names {type(videos).__name__}; supported is {reader.processor}")
            images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", **options)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
            parts = {"image_processor": images, "tokenizer": tokenizer, "video_processor": videos}
            processor = PretrainedVideoProcessor(make_processor(folder, class_name(folder, arch), parts), arch)
            processor.try_out()
    except (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"transformers cannot read videos with these settings ({reader.processor}): {first_lines(error)}"
        ) from error
    return processor
