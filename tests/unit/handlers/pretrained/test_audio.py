"""Sound files to samples."""

from __future__ import annotations

import base64
import struct
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from flambeau.errors import BadRequest
from flambeau.handlers.pretrained import audio
from flambeau.handlers.pretrained.audio import decode_wav, read_audio, resample

SAMPLES = np.array([0.0, 0.5, -0.5, 0.25], np.float32)


def wav(body: bytes, kind: int, bits: int, channels: int = 1, rate: int = 8000, extra: bytes = b"") -> bytes:
    """A file with a chunk that is no business of ours before the samples."""
    head = struct.pack("<HHIIHH", kind, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits) + extra
    chunks = b"fmt " + struct.pack("<I", len(head)) + head
    chunks += b"LIST" + struct.pack("<I", 3) + b"abc\0"
    chunks += b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


EXTENSION = struct.pack("<HHIH", 22, 24, 4, 1) + bytes(14)
BODIES = {
    "8 bits": (((SAMPLES * 128) + 128).astype(np.uint8).tobytes(), 1, 8),
    "16 bits": ((SAMPLES * 2**15).astype("<i2").tobytes(), 1, 16),
    "24 bits": (b"".join(int(s * 2**23).to_bytes(3, "little", signed=True) for s in SAMPLES), 1, 24),
    "32 bits": ((SAMPLES * 2**31).astype("<i4").tobytes(), 1, 32),
    "float": (SAMPLES.astype("<f4").tobytes(), 3, 32),
    "double": (SAMPLES.astype("<f8").tobytes(), 3, 64),
}


@pytest.mark.parametrize("name", BODIES)
def test_every_width_of_samples_is_read(name):
    samples, rate = decode_wav(wav(*BODIES[name]))
    assert rate == 8000
    assert samples.tolist() == pytest.approx(SAMPLES.tolist(), abs=1e-6)


def test_channels_are_averaged_and_extended_headers_are_read():
    stereo = np.stack([SAMPLES, -SAMPLES], 1).astype("<f4").tobytes()
    assert decode_wav(wav(stereo, 3, 32, channels=2))[0].tolist() == [0, 0, 0, 0]
    body, _, bits = BODIES["24 bits"]
    assert decode_wav(wav(body, 0xFFFE, bits, extra=EXTENSION))[0].tolist() == pytest.approx(SAMPLES.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("own", "wanted"), [(44_100, 16_000), (8_000, 16_000), (48_000, 16_000), (22_050, 16_000), (16_004, 16_000)]
)
def test_resampled_tone_is_the_tone_at_the_other_rate(own, wanted):
    def tone(rate: int) -> np.ndarray:
        return np.sin(2 * np.pi * 1000 * np.arange(rate // 4) / rate).astype(np.float32)

    found = resample(tone(own), own, wanted)
    assert abs(len(found) - wanted // 4) <= 1
    middle = slice(200, len(found) - 200)  # the ends have no neighbors
    assert np.abs(found[middle] - tone(wanted)[: len(found)][middle]).max() < 5e-3


@pytest.mark.parametrize(("own", "wanted"), [(44_100, 16_000), (8_000, 16_000)])
def test_a_long_sound_is_resampled_in_portions(monkeypatch, own, wanted):
    noise = np.random.default_rng(1).uniform(-1, 1, 5000).astype(np.float32)
    whole = resample(noise, own, wanted)
    monkeypatch.setattr(audio, "RESAMPLED", 1000)
    assert np.abs(resample(noise, own, wanted) - whole).max() < 1e-6
    assert len(whole) == -(-5000 * wanted // own)


@pytest.mark.perf
def test_a_short_sound_of_an_odd_rate_takes_little_time():
    began = time.process_time()
    resample(np.zeros(1600, np.float32), 16_004, 16_000)
    assert time.process_time() - began < 0.7  # 2.4 s with all numbers of 4,000 kernels, most of which are 0


def test_frequencies_that_do_not_fit_are_removed():
    high = np.sin(2 * np.pi * 15_000 * np.arange(12_000) / 48_000).astype(np.float32)
    assert np.abs(resample(high, 48_000, 16_000)[100:-100]).max() < 1e-2


def test_base64_and_data_urls_are_sounds():
    file = wav(*BODIES["16 bits"])
    text = base64.b64encode(file).decode()
    for item in (file, text, f"data:audio/wav;base64,{text}"):
        assert read_audio(item, 8000).tolist() == pytest.approx(SAMPLES.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (b"", "not a WAV file|not a sound file"),
        (b"ID3\x03 an mp3", "soundfile|not a sound file"),
        (wav(b"", 1, 16), "no samples"),
        (wav(b"\0\0", 2, 4), "format 2 with 4 bits"),
        (wav(b"\0\0", 1, 16, rate=0), "0 samples per second"),
        (wav(b"\0\0", 1, 16)[:30], "cut off"),
        (wav(struct.pack("<3f", 0, np.nan, 0), 3, 32), "no finite numbers"),
        (wav(struct.pack("<3f", 0, -np.inf, 0), 3, 32), "no finite numbers"),
        (wav(struct.pack("<3d", 0, 1e300, 0), 3, 64), "no finite numbers"),
        ({"array": [0.0, 3e38], "sampling_rate": 8000}, "very large ones"),
        ({"array": [0.0], "sampling_rate": "fast"}, "sampling_rate must be"),
        ({"array": [[0.0]], "sampling_rate": 8000}, "one channel"),
        ({"array": [0.0], "rate": 8000}, "unknown key 'rate'"),
        ("not base64!", "not base64"),
        (5, "send a sound file"),
    ],
)
def test_other_input_is_refused_with_the_reason(item, reason):
    with pytest.raises(BadRequest, match=reason):
        read_audio(item, 8000)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (wav(bytes(2000), 1, 16, rate=44_101), "44101 samples per second, which cannot be converted to 16000"),
        (wav(bytes(40_000), 1, 16, rate=1), "the sound is 20000.0 s long; the limit is 14400 s"),
        (
            wav(bytes(2000), 1, 16, channels=65),
            "65 channels at 8000 samples per second, which is not supported; send 1 or",
        ),
    ],
)
def test_sounds_that_would_take_gigabytes_are_refused_at_once(data, reason):
    with pytest.raises(BadRequest, match=reason):
        read_audio(data, 16_000)


def test_a_whole_file_is_asked_for_where_it_is_needed():
    cut = wav(bytes(2000), 1, 16)[:-500]
    assert len(read_audio(cut, 8000)) == 750
    with pytest.raises(BadRequest, match="cut off: 1500 of 2000 bytes of samples are there; send the whole file"):
        read_audio(cut, 8000, is_whole=True)
    stream = cut.replace(struct.pack("<4sI", b"data", 2000), struct.pack("<4sI", b"data", 0xFFFFFFFF))
    assert len(read_audio(stream, 8000, is_whole=True)) == 750


class FakeFile:
    """A file of an hour that holds less than it says."""

    samplerate, channels = 16_000, 2

    def __init__(self, file):
        self.left = 8000

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __len__(self):
        return 16_000 * 3600

    def read(self, frames, **options):
        assert frames <= audio.PORTION
        number = min(frames, self.left, 3000)
        self.left -= number
        return np.stack([np.full(number, self.left), np.zeros(number)], 1).astype(np.float32)


def test_other_formats_are_decoded_within_the_limit(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", SimpleNamespace(SoundFile=FakeFile))
    with pytest.raises(BadRequest, match=r"the sound is 3600.0 s long; the limit is 30 s"):
        read_audio(b"fLaC", 16_000, longest_s=30)
    expected = np.repeat([2500.0, 1000.0, 0.0], [3000, 3000, 2000])  # averages of the channels of three portions
    assert read_audio(b"fLaC", 16_000, longest_s=3600).tolist() == expected.tolist()
    with pytest.raises(BadRequest, match="the sound is cut off: 8000 of 57600000 samples are there"):
        read_audio(b"fLaC", 16_000, longest_s=3600, is_whole=True)
