"""Files of videos: what is known of them at once, which frames are decoded, and what is rejected, by name."""

from __future__ import annotations

import itertools
import resource
import struct
import sys
import time

import numpy as np
import pytest

pytest.importorskip("av")

from flambeau.llm.errors import InvalidRequest
from flambeau.llm.images import video_files
from flambeau.llm.images.video_files import VideoFile, facts_of, frames_at
from support.pictures import claimed_png, encode, jpeg, picture
from support.videos import frames_of, hidden, jpegs, video

NAME = "messages[0].content[1]"
PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
CONCAT = b"ffconcat version 1.0\nfile /etc/passwd\n"


def file(data: bytes | tuple[bytes, ...]) -> VideoFile:
    return VideoFile(frames=data, name=NAME) if isinstance(data, tuple) else VideoFile(data=data, name=NAME)


@pytest.mark.parametrize(("container", "codec"), [("mp4", "mpeg4"), ("matroska", "mjpeg"), ("avi", "mpeg4")])
def test_frames_are_counted_before_they_are_decoded(container, codec):
    """Some files do not say how many they have."""
    data = video(1, 64, 48, 9, 3, container=container, codec=codec)
    facts = facts_of(file(data))
    assert (facts.num_frames, facts.rate, facts.size, facts.is_sampled) == (9, 3.0, (48, 64), False)
    every = frames_of(data)
    found = [*frames_at(file(data), facts, {0, 4, 8})]
    assert all((one == every[place]).all() for one, place in zip(found, (0, 4, 8), strict=True))


def test_frames_that_come_as_images():
    frames = jpegs(3, 40, 32)
    facts = facts_of(file(frames))
    assert (facts.num_frames, facts.rate, facts.size, facts.is_sampled) == (3, 2.0, (32, 40), True)
    assert [one.shape for one in frames_at(file(frames), facts, [0, 1, 2])] == [(32, 40, 3)] * 3


def test_a_turned_video_is_upright():
    """The header says that the camera was held upright: a quarter turn with the clock."""
    plain = video(1, 64, 48, 4)
    every, matrix = frames_of(plain), plain.index(b"tkhd") + 4 + 40
    turned = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 48 << 16, 0, 1 << 30)
    data = plain[:matrix] + turned + plain[matrix + 36 :]
    facts = facts_of(file(data))
    assert facts.size == (64, 48)
    assert (next(frames_at(file(data), facts, [0])) == np.rot90(every[0], 3)).all()


CLIP = video(1, 64, 48, 9)
BROKEN = {
    "nothing": (b"\0", "is not a video that can be read"),
    "text": (b"no video at all" * 100, "is not a video that can be read"),
    "an image": (jpeg(1), "is not a video that can be read"),
    "a beginning": (CLIP[: len(CLIP) // 3], "is not a video that can be read"),
    "all but the end": (video(1, 120, 40, 12, 6)[:-200], "it has no frames; it may be cut off"),
    "an unknown codec": (video(1, 64, 48, 9, container="avi").replace(b"FMP4", b"ZZZZ"), "its codec is unknown"),
    "a playlist": (PLAYLIST, "is not a video that can be read"),
    "a list of files": (CONCAT, "is not a video that can be read"),
    "one frame": (video(1, 64, 48, 1), "a video of 1 frames; send at least two, or an image"),
    "one image": (jpegs(1), "a video of 1 frames"),
    "images of two sizes": ((*jpegs(2), *jpegs(1, 64, 48)), "frame 2 has 64 x 48 pixels, and the first one 120 x 40"),
    "no image": ((jpeg(1), b"no"), "is not an image that can be read"),
    "a large image": ((claimed_png(9000, 9000), jpeg(1)), "9000 x 9000 pixels; send at most"),
    "many images": ((b"x",) * 20_001, "more than 20000 frames; send at most 20000: cut it"),
}


def read_all(one: VideoFile) -> None:
    facts = facts_of(one)
    for _ in frames_at(one, facts, range(facts.num_frames)):
        pass


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_named_at_once(name):
    data, reason = BROKEN[name]
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match=reason) as caught:
        read_all(file(data))
    assert caught.value.parameter == NAME
    assert NAME in str(caught.value)
    assert "send" in str(caught.value)
    assert time.monotonic() - began < 5


def test_a_video_of_few_frames_and_many_hours_is_rejected(monkeypatch):
    monkeypatch.setattr(video_files, "MAX_HOURS", 8 / 3600)
    with pytest.raises(InvalidRequest, match="hours; send a shorter one: cut it"):
        facts_of(file(video(1, 64, 48, 9, 1)))


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_video_of_many_frames_is_rejected_before_it_is_decoded(monkeypatch, container):
    monkeypatch.setattr(video_files, "MAX_FRAMES", 8)
    monkeypatch.setattr(video_files, "decoded", lambda *given: pytest.fail("it was decoded"))
    data = video(1, 64, 48, 12, 1, container=container)
    with pytest.raises(InvalidRequest, match="at most 8: cut it, or lower its frame rate"):
        facts_of(file(data))


def test_large_frames_are_rejected(monkeypatch):
    monkeypatch.setattr(video_files, "MAX_FRAME_PIXELS", 64 * 48 - 1)
    with pytest.raises(InvalidRequest, match="64 x 48 pixels; send at most 3071 pixels a frame"):
        facts_of(file(CLIP))
    monkeypatch.setattr(video_files, "MAX_FRAME_PIXELS", 64 * 48)
    monkeypatch.setattr(video_files, "MAX_DECODED_PIXELS", 64 * 48 * 9 - 1)
    with pytest.raises(InvalidRequest, match="9 frames of 64 x 48 pixels; send at most"):
        facts_of(file(CLIP))
    with pytest.raises(InvalidRequest, match="more than 100 MB"):
        facts_of(file(bytes(video_files.MAX_BYTES + 1)))


@pytest.mark.parametrize("data", [CLIP, jpegs(9)], ids=["file", "frames"])
def test_decoding_has_a_deadline_and_can_be_cancelled(monkeypatch, data):
    facts = facts_of(file(data))
    assert [*frames_at(file(data), facts, [8], lambda: True)] == []
    monkeypatch.setattr(video_files, "MAX_SECONDS", -1.0)
    with pytest.raises(InvalidRequest, match="to decode; send a shorter or smaller one"):
        [*frames_at(file(data), facts, [8])]


def test_frames_that_are_not_shown_take_no_more_time_than_others(monkeypatch):
    """Packets of hidden frames give no frames, between which the deadline could be looked at."""
    data = hidden(video(1, 64, 48, 9, container="webm", codec="libvpx"))
    facts = facts_of(file(data))
    assert facts.num_frames == 9
    is_cancelled = iter([False, False, True, True]).__next__
    assert [*frames_at(file(data), facts, [8], is_cancelled)] == []
    with pytest.raises(InvalidRequest, match="it ends before frame 8 of 9"):
        [*frames_at(file(data), facts, [8])]
    now = itertools.count(step=video_files.MAX_SECONDS / 4)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    with pytest.raises(InvalidRequest, match="takes more than 60 s to decode"):
        [*frames_at(file(data), facts, [8])]


def test_a_file_of_few_bytes_cannot_have_an_index_of_gigabytes():
    """The header says that all of 60 million samples are alike: an entry of the index for each is made of 4 bytes."""
    data = bytearray(CLIP)
    for name, place in ((b"stsz", 12), (b"stsc", 16), (b"stts", 12)):
        struct.pack_into(">I", data, data.index(name) + place, 60_000_000)
    struct.pack_into(">I", data, data.index(b"stsz") + 8, 1)  # the size of each
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequest, match="more than 20000 frames"):
        facts_of(file(bytes(data)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10  # kB


def test_without_the_package_its_name_is_in_the_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'flambeau\[video\]'"):
        facts_of(file(CLIP))
    assert facts_of(file((encode(picture(8, 8)),) * 2)).num_frames == 2
