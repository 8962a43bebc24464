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
MAX_SAMPLES = 16_000 * 3600 * 4  # four hours at 16 kHz
MAX_RATE = 768_000


def read_audio(item: Any, rate: int) -> Array:
    """One channel of float32 samples at this rate, from a file, its base64 text, or `{"array", "sampling_rate"}`."""
    if isinstance(item, Mapping) and item.keys() & {"array", "raw"}:
        samples, own = read_numbers(item)
    else:
        if isinstance(item, str):
            if item.startswith(("http://", "https://")):
                raise BadRequest("the server fetches no addresses; send the file itself, or its base64 text")
            item = decode_base64(item.partition(",")[2] if item.startswith("data:") else item)
        if not isinstance(item, (bytes, bytearray, memoryview)):
            raise BadRequest('send a sound file as bytes, as base64 text, or as {"array": […], "sampling_rate": …}')
        samples, own = decode_sound(bytes(item))
    if not len(samples):
        raise BadRequest("the sound has no samples")
    if len(samples) > MAX_SAMPLES:
        raise BadRequest(f"the sound has {len(samples)} samples; the limit is {MAX_SAMPLES}: send it in parts")
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


def decode_sound(data: bytes) -> tuple[Array, int]:
    """Samples, channels averaged, and their rate."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return decode_wav(data)
    try:
        soundfile = importlib.import_module("soundfile")
    except (ImportError, OSError):  # OSError: its library is missing
        raise BadRequest(
            f"the {len(data)} bytes are not a WAV file; for other formats the server needs soundfile "
            "(pip install 'flambeau[audio]')"
        ) from None
    try:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except Exception as error:  # damaged files raise any error
        raise BadRequest(f"the {len(data)} bytes are not a sound file that can be read: {error}") from None
    return samples.mean(1), int(rate)


def decode_wav(data: bytes) -> tuple[Array, int]:
    """Decode RIFF/WAVE with integers of 8 to 32 bits, or floats."""
    format_, body, place = b"", None, 12
    while place + 8 <= len(data) and body is None:
        name, size = data[place : place + 4], struct.unpack_from("<I", data, place + 4)[0]
        chunk = data[place + 8 : place + 8 + size]  # a stream's size may be wrong: take what is there
        if name == b"fmt ":
            format_ = chunk
        elif name == b"data":
            body = chunk
        place += 8 + size + size % 2
    if len(format_) < 16 or body is None:
        raise BadRequest("the WAV file has no format or no samples; it may be cut off")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", format_)
    if kind == EXTENSIBLE and len(format_) >= 26:
        kind = struct.unpack_from("<H", format_, 24)[0]
    if not 0 < rate <= MAX_RATE or not 0 < channels <= 64:
        raise BadRequest(f"the WAV file has {channels} channels at {rate} samples per second, which is not supported")
    samples = to_samples(body, kind, bits)
    return samples[: len(samples) // channels * channels].reshape(-1, channels).mean(1, dtype=np.float32), rate


def to_samples(body: bytes, kind: int, bits: int) -> Array:
    """Samples from -1 to 1."""
    width = bits // 8
    if width:
        body = body[: len(body) // width * width]
    if kind == FLOAT and bits in (32, 64):
        samples: Array = np.nan_to_num(np.frombuffer(body, f"<f{width}").astype(np.float32))
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
    # Output q · up + r lies at the input time q · down + r · down / up: one kernel for each r, moved by `down` a step.
    times = torch.arange(up, dtype=torch.float64)[:, None] * down / up
    distances = torch.arange(-half, half + down + 1, dtype=torch.float64)[None] - times
    window = torch.cos(distances.clamp(-half, half) * math.pi / (2 * half)) ** 2
    kernels = (torch.sinc(distances * scale) * window * scale).float()
    count = math.ceil(len(samples) * up / down)
    padded = torch.nn.functional.pad(torch.from_numpy(np.ascontiguousarray(samples)), (half, half + 2 * down))
    found = torch.nn.functional.conv1d(padded[None, None], kernels[:, None], stride=down)[0]
    result: Array = found.T.reshape(-1)[:count].numpy()
    return result
