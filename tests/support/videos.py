"""Videos made on the spot with PyAV: pictures that move, so that every frame differs."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from support.pictures import encode, picture


def frame(width: int, height: int, seed: int, place: int) -> np.ndarray[Any, Any]:
    return np.roll(np.asarray(picture(width, height, seed)), 5 * place, axis=1)


def video(
    seed: int = 0,
    width: int = 120,
    height: int = 40,
    num_frames: int = 12,
    rate: int = 6,
    *,
    container: str = "mp4",
    codec: str = "mpeg4",
) -> bytes:
    """The file of a video."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as made:
        stream: Any = made.add_stream(codec, rate=rate)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for place in range(num_frames):
            made.mux(stream.encode(av.VideoFrame.from_ndarray(frame(width, height, seed, place), format="rgb24")))
        made.mux(stream.encode())
    return buffer.getvalue()


def hidden(data: bytes) -> bytes:
    """A video of VP8, of which only the first frame is shown."""
    import av

    buffer = io.BytesIO()
    with av.open(io.BytesIO(data)) as opened, av.open(buffer, "w", format="webm") as made:
        stream = made.add_stream_from_template(opened.streams.video[0])
        for place, packet in enumerate(one for one in opened.demux(video=0) if one.size):
            content = bytearray(bytes(packet))
            if place:
                content[0] &= ~0x10  # show_frame
            changed = av.Packet(bytes(content))
            changed.stream, changed.time_base = stream, packet.time_base
            changed.pts, changed.dts, changed.is_keyframe = packet.pts, packet.dts, packet.is_keyframe
            made.mux(changed)
    return buffer.getvalue()


def frames_of(data: bytes) -> np.ndarray[Any, Any]:
    """All frames of a video: frames, rows, columns, colors."""
    import av

    with av.open(io.BytesIO(data)) as opened:
        return np.stack([one.to_ndarray(format="rgb24") for one in opened.decode(video=0)])


def jpegs(number: int, width: int = 120, height: int = 40, seed: int = 0) -> tuple[bytes, ...]:
    """Frames as files of images."""
    return tuple(encode(picture(width, height, seed + place)) for place in range(number))


def data_url(data: bytes | tuple[bytes, ...]) -> str:
    if isinstance(data, tuple):
        return "data:video/jpeg;base64," + ",".join(base64.b64encode(one).decode() for one in data)
    return f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
