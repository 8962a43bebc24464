"""VideoFile: the file of a video in a request, or its frames as images; decoded here, within limits.

PyAV decodes. Only common formats and codecs are opened, and nothing that a file names elsewhere is read.

Shapes: H height · W width
"""

from __future__ import annotations

import ctypes
import io
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flambeau.llm.errors import InvalidRequest
from flambeau.llm.images.image_files import ImageFile, open_image, size_of

MAX_BYTES = 100 << 20  # of a file, or of all frames
MAX_FRAMES = 20_000  # that are decoded: 11 minutes with 30 a second
MAX_FRAME_PIXELS = 3840 * 2160
MAX_DECODED_PIXELS = 12_000_000_000  # two minutes of 1920 x 1080, or eleven of 720 x 480, with 30 frames a second
MAX_HOURS = 6
MAX_SECONDS = 60.0  # that decoding may take
MAX_STREAMS = 32  # of a file: pictures, sounds and subtitles
MAX_ALLOCATION = 32 << 20  # bytes: a frame, or an index of six hours
FRAME_RATE = 2.0  # of frames that come as images, a second; they are not sampled again
FORMATS = ("mp4", "mov", "webm", "matroska", "avi", "mpegts", "gif")
CODECS = (
    "h264",
    "hevc",
    "vp8",
    "vp9",
    "libvpx",
    "libvpx-vp9",
    "av1",
    "libdav1d",
    "mpeg4",
    "mpeg2video",
    "mjpeg",
    "gif",
)
OPTIONS = {
    "format_whitelist": ",".join(FORMATS),
    "protocol_whitelist": "none",
    "codec_whitelist": ",".join(CODECS),
    "max_streams": str(MAX_STREAMS),
}
REMEDY = "send a whole file of the format mp4, mov, webm, mkv, avi, ts or gif, for example with H.264"

Pixels = NDArray[np.uint8]  # [H, W, 3]


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFile:
    """A video in a request; `name` is its place there."""

    data: bytes = b""
    frames: tuple[bytes, ...] = ()  # instead of a file: images, in their order
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFacts:
    """What is known of a video before its frames are decoded."""

    num_frames: int
    rate: float  # frames a second
    size: tuple[int, int]  # height and width, upright
    is_sampled: bool = False  # its frames are all to be read


def facts_of(file: VideoFile) -> VideoFacts:
    """Raises InvalidRequest for a video that is not read; one frame is decoded."""
    if sum(map(len, (file.data, *file.frames))) > MAX_BYTES:
        raise too_large(
            file, f"more than {MAX_BYTES >> 20} MB", f"at most {MAX_BYTES >> 20} MB: a shorter or smaller one"
        )
    if file.frames:
        return facts_of_frames(file)
    with opened(file) as (container, stream):
        rate = stream.average_rate
        if not rate or rate <= 0:
            raise not_read(file, "it does not say how many frames a second it has")
        num_frames = stream.frames if stream.frames > MAX_FRAMES else num_packets(container, stream)
        check_frames(file, num_frames)
        if num_frames / rate > MAX_HOURS * 3600:
            raise too_large(file, f"more than {MAX_HOURS} hours", "a shorter one: cut it")
        container.seek(0)
        first = next(decoded(file, container, stream, deadline_of(file)), None)
        if first is None:
            raise not_read(file, "it has no frames")
        height, width = upright(first).shape[:2]
        check_pixels(file, (height, width), num_frames)
        return VideoFacts(num_frames=num_frames, rate=float(rate), size=(height, width))


def facts_of_frames(file: VideoFile) -> VideoFacts:
    check_frames(file, len(file.frames))
    size = size_of(frame_of(file, 0))
    check_pixels(file, size, len(file.frames))
    return VideoFacts(num_frames=len(file.frames), rate=FRAME_RATE, size=size, is_sampled=True)


def frames_at(
    file: VideoFile, facts: VideoFacts, places: Collection[int], is_cancelled: Callable[[], bool] = lambda: False
) -> Iterator[Pixels]:
    """The frames at these places, in their order. Raises InvalidRequest if one of them cannot be decoded."""
    may_go_on = deadline_of(file, is_cancelled)
    if file.frames:
        for place in sorted(places):
            if not may_go_on():
                return
            image = np.array(open_image(frame_of(file, place)))
            check_size(file, facts, image, place)
            yield image
        return
    wanted = frozenset(places)
    found = 0
    with opened(file) as (container, stream):
        for place, frame in enumerate(islice(decoded(file, container, stream, may_go_on), max(places) + 1)):
            if place in wanted:
                image = upright(frame)
                check_size(file, facts, image, place)
                found += 1
                yield image
    if found < len(wanted) and not is_cancelled():
        raise not_read(file, f"it ends before frame {max(places)} of {facts.num_frames}")


def upright(frame: Any) -> Pixels:
    """The frame in RGB, turned as its camera was held."""
    pixels: Pixels = frame.to_ndarray(format="rgb24")
    return np.rot90(pixels, round(frame.rotation / 90) % 4)  # in degrees against the clock


def frame_of(file: VideoFile, place: int) -> ImageFile:
    return ImageFile(data=file.frames[place], name=file.name)


def num_packets(container: Any, stream: Any) -> int:
    """How many frames are shown: files may count others, too, or none."""
    packets = islice(container.demux(stream), MAX_FRAMES + 2)
    return sum(packet.size > 0 and not packet.is_discard for packet in packets)


def deadline_of(file: VideoFile, is_cancelled: Callable[[], bool] = lambda: False) -> Callable[[], bool]:
    """Whether decoding may go on, which begins now. Raises InvalidRequest if it takes too long."""
    deadline = time.monotonic() + MAX_SECONDS

    def may_go_on() -> bool:
        if time.monotonic() > deadline:
            raise too_large(file, f"one that takes more than {MAX_SECONDS:g} s to decode", "a shorter or smaller one")
        return not is_cancelled()

    return may_go_on


def decoded(file: VideoFile, container: Any, stream: Any, may_go_on: Callable[[], bool]) -> Iterator[Any]:
    for packet in container.demux(stream):
        if not may_go_on():  # asked for each packet: there may be many whose frames are not shown
            return
        for frame in packet.decode():
            if frame.width * frame.height > MAX_FRAME_PIXELS:  # it may change within a file
                raise too_many_pixels(file, (frame.height, frame.width))
            yield frame


@contextmanager
def opened(file: VideoFile) -> Iterator[tuple[Any, Any]]:
    """The container and its video. Raises InvalidRequest, also for what fails later, while it is used."""
    try:
        import av
    except ImportError:
        raise InvalidRequest(
            f"{file.name} is a video, and the server has no PyAV, which decodes it: pip install 'flambeau[video]'; or "
            "send its frames as JPEGs (data:video/jpeg;base64,…,…)",
            file.name,
        ) from None
    limit_allocations()
    try:
        with av.open(io.BytesIO(file.data), options=OPTIONS, metadata_errors="ignore") as container:
            if not container.streams.video:
                raise not_read(file, "it has no pictures")
            stream = container.streams.video[0]
            if stream.codec_context is None:
                raise not_read(file, "its codec is unknown")
            if stream.width * stream.height > MAX_FRAME_PIXELS:
                raise too_many_pixels(file, (stream.height, stream.width))
            yield container, stream
    except InvalidRequest:
        raise
    except (av.FFmpegError, ValueError, OSError, MemoryError) as error:  # a broken file
        raise not_read(file, str(getattr(error, "strerror", "") or error)[:100]) from None


# ---- limits ----


@lru_cache(1)
def limit_allocations() -> None:
    """Let FFmpeg allocate no more at a time, in this process: an index of gigabytes takes a few bytes of a file."""
    import av._core

    with suppress(AttributeError, OSError):  # a library that does not export it
        limit = ctypes.CDLL(av._core.__file__).av_max_alloc
        limit.argtypes, limit.restype = [ctypes.c_size_t], None
        limit(MAX_ALLOCATION)


def check_frames(file: VideoFile, num_frames: int) -> None:
    if num_frames == 0:
        raise not_read(file, "it has no frames; it may be cut off")
    if num_frames < 2:
        raise InvalidRequest(
            f"{file.name} is a video of {num_frames} frames; send at least two, or an image", file.name
        )
    if num_frames > MAX_FRAMES:
        raise too_large(
            file,
            f"more than {MAX_FRAMES} frames",
            f"at most {MAX_FRAMES}: cut it, or lower its frame rate",
        )


def check_pixels(file: VideoFile, size: tuple[int, int], num_frames: int) -> None:
    if size[0] * size[1] > MAX_FRAME_PIXELS:
        raise too_many_pixels(file, size)
    if size[0] * size[1] * num_frames > MAX_DECODED_PIXELS:
        raise too_large(
            file,
            f"{num_frames} frames of {size[1]} x {size[0]} pixels",
            f"at most {MAX_DECODED_PIXELS:.1e} pixels in all: cut it, make it smaller, or lower its frame rate",
        )


def check_size(file: VideoFile, facts: VideoFacts, frame: Pixels, place: int) -> None:
    height, width = frame.shape[:2]
    if (height, width) != facts.size:
        raise not_read(
            file, f"frame {place} has {width} x {height} pixels, and the first one {facts.size[1]} x {facts.size[0]}"
        )


def too_many_pixels(file: VideoFile, size: tuple[int, int]) -> InvalidRequest:
    return too_large(
        file, f"{size[1]} x {size[0]} pixels", f"at most {MAX_FRAME_PIXELS} pixels a frame: make it smaller"
    )


def too_large(file: VideoFile, what: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(f"{file.name} is a video of {what}; send {remedy}", file.name)


def not_read(file: VideoFile, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{file.name} is not a video that can be read ({reason}); {REMEDY}", file.name)
