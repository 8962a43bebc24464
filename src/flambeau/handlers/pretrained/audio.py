"""Sound files to samples: WAV by itself, other formats with soundfile if it is installed."""

from __future__ import annotations

import importlib
import io
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from flambeau.errors import BadRequest
from flambeau.handlers.onnx.npy import Array
from flambeau.handlers.pretrained.task_request import check_keys
from flambeau.handlers.request_rows import decode_base64

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
LONGEST_S = 3600.0 * 4
MAX_SAMPLES = 16_000 * 3600 * 4 * 2  # of all channels: four hours of two at 16 kHz
MAX_RATE = 768_000
PORTION = 1 << 16  # samples of each channel that are decoded at a time
RESAMPLED = 1 << 20  # … that are resampled at a time
LOUDEST = 2.0**31  # of samples, which are about 1: files of floats may have the numbers of integers
OPEN_END = 0x7FFF0000  # sizes from there on stand for one that was not known when the file began
MAX_KERNELS = 1 << 24  # numbers that resampling needs; rates without a common divisor need most


class LongSound(BadRequest):
    """A sound is longer than is read."""


def read_audio(item: Any, rate: int, *, longest_s: float = LONGEST_S, is_whole: bool = False) -> Array:
    """One channel of float32 samples at this rate, from a file, its base64 text, or `{"array", "sampling_rate"}`.

    Longer sounds are rejected before they are decoded, where their files say how long they are; with `is_whole`, so are
    files that are shorter than they say.
    """
    if isinstance(item, Mapping) and item.keys() & {"array", "raw"}:
        samples, own = read_numbers(item)
    else:
        if isinstance(item, str):
            if item.startswith(("http://", "https://")):
                raise BadRequest("the server fetches no addresses; send the file itself, or its base64 text")
            item = decode_base64(item.partition(",")[2] if item.startswith("data:") else item)
        if not isinstance(item, (bytes, bytearray, memoryview)):
            raise BadRequest('send a sound file as bytes, as base64 text, or as {"array": […], "sampling_rate": …}')
        samples, own = decode_sound(bytes(item), longest_s, is_whole=is_whole)
    if not len(samples):
        raise BadRequest("the sound has no samples")
    check_length(len(samples) / own, longest_s)
    if not (samples.min() >= -LOUDEST and samples.max() <= LOUDEST):  # one of them is not a number, perhaps
        raise BadRequest(
            "the sound has samples that are no finite numbers, or very large ones; send samples from -1 to 1"
        )
    return resample(samples, own, rate)


def read_numbers(item: Mapping[str, Any]) -> tuple[Array, int]:
    check_keys(item, ("array", "raw", "sampling_rate", "path"))
    rate = item.get("sampling_rate")
    if type(rate) is not int or not 0 < rate <= MAX_RATE:
        raise BadRequest(f"sampling_rate must be a whole number of samples per second, not {rate!r}")
    try:
        samples = np.asarray(item.get("array", item.get("raw")), np.float32)
    except (TypeError, ValueError):
        raise BadRequest("the samples must be a list of numbers") from None
    if samples.ndim != 1 or not np.isfinite(samples).all():
        raise BadRequest("the samples must be one list of finite numbers: one channel")
    return samples, rate


def check_length(length_s: float, longest_s: float) -> None:
    if length_s > longest_s:
        raise LongSound(f"the sound is {length_s:.1f} s long; the limit is {longest_s:g} s: send it in parts")


def check_samples(number: int) -> None:
    if number > MAX_SAMPLES:
        raise BadRequest(f"the sound has {number} samples; the limit is {MAX_SAMPLES}: send it in parts")


def decode_sound(data: bytes, longest_s: float = LONGEST_S, *, is_whole: bool = False) -> tuple[Array, int]:
    """Samples, channels averaged, and their rate."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return decode_wav(data, longest_s, is_whole=is_whole)
    try:
        soundfile = importlib.import_module("soundfile")
    except (ImportError, OSError):  # OSError: its library is missing
        raise BadRequest(
            f"the {len(data)} bytes are not a WAV file; for other formats the server needs soundfile "
            "(pip install 'flambeau[audio]')"
        ) from None
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate, channels = int(file.samplerate), int(file.channels)
            check_rate(channels, rate, "sound")
            check_length(len(file) / rate, longest_s)
            # A header may be wrong: no more is decoded than is accepted.
            most = min(MAX_SAMPLES // channels, int(longest_s * rate)) + 1
            samples = averaged(file, most)
            if is_whole and len(samples) < min(most, len(file)):
                raise cut_off("sound", len(samples), len(file), "samples")
    except BadRequest:
        raise
    except Exception as error:  # damaged files raise any error
        reason = getattr(error, "error_string", error)
        raise BadRequest(f"the {len(data)} bytes are not a sound file that can be read: {reason}") from None
    check_samples(len(samples) * channels)
    check_length(len(samples) / rate, longest_s)
    return samples, rate


def averaged(file: Any, most: int) -> Array:
    """At most so many samples, each the mean of all channels, which are never in memory as a whole."""
    means, number = np.empty(most, np.float32), 0
    while number < most and len(portion := file.read(min(PORTION, most - number), dtype="float32", always_2d=True)):
        means[number : number + len(portion)] = portion.mean(1)
        number += len(portion)
    return means[:number]


def cut_off(kind: str, found: int, expected: int, unit: str) -> BadRequest:
    return BadRequest(f"the {kind} is cut off: {found} of {expected} {unit} are there; send the whole file")


def check_rate(channels: int, rate: int, kind: str) -> None:
    if not 0 < rate <= MAX_RATE or not 0 < channels <= 64:
        raise BadRequest(
            f"the {kind} has {channels} channels at {rate} samples per second, which is not supported; send 1 or 2 "
            "channels at 16000, 44100 or 48000"
        )


def decode_wav(data: bytes, longest_s: float = LONGEST_S, *, is_whole: bool = False) -> tuple[Array, int]:
    """Decode RIFF/WAVE with integers of 8 to 32 bits, or floats."""
    format_, body, place = b"", None, 12
    while place + 8 <= len(data) and body is None:
        name, size = data[place : place + 4], struct.unpack_from("<I", data, place + 4)[0]
        chunk = data[place + 8 : place + 8 + size]  # a stream's size may be wrong: take what is there
        if name == b"fmt ":
            format_ = chunk
        elif name == b"data":
            body = chunk
            if is_whole and len(chunk) < size < OPEN_END:
                raise cut_off("WAV file", len(chunk), size, "bytes of samples")
        place += 8 + size + size % 2
    if len(format_) < 16 or body is None:
        raise BadRequest("the WAV file has no format or no samples; it may be cut off")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", format_)
    if kind == EXTENSIBLE and len(format_) >= 26:
        kind = struct.unpack_from("<H", format_, 24)[0]
    check_rate(channels, rate, "WAV file")
    number = len(body) // max(1, bits // 8)
    check_samples(number)
    check_length(number / channels / rate, longest_s)
    samples = to_samples(body, kind, bits)
    return samples[: len(samples) // channels * channels].reshape(-1, channels).mean(1, dtype=np.float32), rate


def to_samples(body: bytes, kind: int, bits: int) -> Array:
    """Samples from -1 to 1."""
    width = bits // 8
    if width:
        body = body[: len(body) // width * width]
    if kind == FLOAT and bits in (32, 64):
        with np.errstate(over="ignore"):  # large numbers become infinite, and are refused
            samples: Array = np.frombuffer(body, f"<f{width}").astype(np.float32)
        return samples
    if kind == PCM and bits == 8:
        return (np.frombuffer(body, np.uint8).astype(np.float32) - 128) / 128
    if kind == PCM and bits == 24:
        wide = np.zeros((len(body) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(body, np.uint8).reshape(-1, 3)
        whole: Array = wide.view("<i4")[:, 0].astype(np.float32)
        return whole / 2**31
    if kind == PCM and bits in (16, 32):
        numbers: Array = np.frombuffer(body, f"<i{width}").astype(np.float32)
        return numbers / (1 << (bits - 1))
    raise BadRequest(f"the WAV file has samples of format {kind} with {bits} bits; send PCM or float samples")


def resample(samples: Array, own: int, wanted: int) -> Array:
    """Band-limited resampling: a windowed sinc with 12 zero crossings on each side."""
    if own == wanted:
        return samples
    divisor = math.gcd(own, wanted)
    up, down = wanted // divisor, own // divisor
    scale = min(1.0, up / down) * 0.97  # the cutoff, as a part of the input's highest frequency
    half = math.ceil(12 / scale)  # input samples on each side
    if up * (2 * half + down + 1) > MAX_KERNELS:
        raise BadRequest(
            f"the sound has {own} samples per second, which cannot be converted to {wanted}; send it at {wanted}, or "
            "at a rate such as 16000, 44100 or 48000"
        )
    kernels = kernels_of(up, down, half, scale)
    count = math.ceil(len(samples) * up / down)
    num_rows, reach = math.ceil(count / up), kernels.shape[1]  # of `up` samples each; input samples of one
    rows = np.empty((num_rows, up), np.float32)
    step = max(1, RESAMPLED // down)
    for row in range(0, num_rows, step):
        number = min(step, num_rows - row)
        part = torch.from_numpy(between(samples, row * down - half, (number - 1) * down + reach))
        rows[row : row + number] = torch.nn.functional.conv1d(part[None, None], kernels[:, None], stride=down)[0].T
    result: Array = rows.reshape(-1)[:count]
    return result


def kernels_of(up: int, down: int, half: int, scale: float) -> torch.Tensor:
    """The kernel of each output of a row. Few numbers of one are not 0, so only these are computed."""
    # Output q · up + r lies at the input time q · down + r · down / up: one kernel for each r, moved by `down` a step.
    times = torch.arange(up, dtype=torch.float64)[:, None] * down / up
    places = times.floor() + torch.arange(-half, half + 2, dtype=torch.float64)
    distances = places - times
    window = torch.cos(distances.clamp(-half, half) * math.pi / (2 * half)) ** 2
    kernels = torch.zeros(up, 2 * half + down + 1)
    return kernels.scatter_(1, places.long() + half, (torch.sinc(distances * scale) * window * scale).float())


def between(samples: Array, start: int, number: int) -> Array:
    """So many samples from `start` on, which are zero outside of the sound."""
    found = np.zeros(number, np.float32)
    inside = samples[max(0, start) : max(0, start + number)]
    place = max(0, -start)
    found[place : place + len(inside)] = inside
    return found
