"""Sounds that a handler makes: WAV files, and the formats of OpenAI's API that are made of them."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from flambeau.errors import InvalidField, JobFailed

CONTENT_TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
}
ENCODED = ("mp3", "flac", "opus")  # made of the whole sound by soundfile, in a process of its own
ENCODER = "flambeau.frontend.openai.sound_encoder"
ENCODING_S = 120.0
MAX_PROCESSES = 4
PCM_RATE = 24_000  # clients read the samples of `pcm` with this rate
PCM, EXTENSIBLE = 1, 0xFFFE
OPEN_END = 0xFFFFFFFF  # the size of a stream


class InvalidSound(Exception):
    """A handler's sound is no WAV file, or does not continue the one before."""


@dataclass(frozen=True, slots=True)
class Sound:
    """The samples of a WAV file, and the content of its format chunk."""

    form: bytes
    data: bytes

    @property
    def kind(self) -> int:
        """The coding of the samples."""
        kind: int = struct.unpack_from("<H", self.form)[0]
        if kind == EXTENSIBLE and len(self.form) >= 26:
            kind = struct.unpack_from("<H", self.form, 24)[0]
        return kind

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, samples per second and bits of a sample."""
        channels, rate, _, _, bits = struct.unpack_from("<HIIHH", self.form, 2)
        return channels, rate, bits


def read_wav(file: bytes) -> Sound:
    if file[:4] != b"RIFF" or file[8:12] != b"WAVE":
        raise InvalidSound(f"its {len(file)} bytes begin with {file[:12]!r}")
    form, place = b"", 12
    while place + 8 <= len(file):
        name, size = file[place : place + 4], struct.unpack_from("<I", file, place + 4)[0]
        if name == b"fmt ":
            form = file[place + 8 : place + 8 + size]
        elif name == b"data":
            if len(form) < 16:
                break
            return Sound(form, file[place + 8 : place + 8 + size])  # of a size that is not known, what is there
        place += 8 + size + size % 2
    raise InvalidSound("the WAV file has no format or no samples; it may be cut off")


def check_next(first: Sound, sound: Sound) -> None:
    """Raise InvalidSound if a sound cannot follow the first one of a stream."""
    if sound.form != first.form:
        raise InvalidSound(f"a sound of {words_of(sound)} follows one of {words_of(first)}")


def words_of(sound: Sound) -> str:
    channels, rate, bits = sound.shape
    return f"{channels} channel{'s' if channels != 1 else ''}, {rate} samples per second and {bits} bits"


def wav_head(form: bytes, size_bytes: int | None) -> bytes:
    """What comes before the samples; None: their number is not known."""
    size = OPEN_END if size_bytes is None else min(size_bytes, OPEN_END)
    padded = form + b"\0" * (len(form) % 2)
    whole = OPEN_END if size == OPEN_END else min(20 + len(padded) + size + size % 2, OPEN_END)
    return b"RIFF%bWAVEfmt %b%bdata%b" % (as_size(whole), as_size(len(form)), padded, as_size(size))


def as_size(size: int) -> bytes:
    return struct.pack("<I", size)


def wav_file(sounds: Sequence[Sound]) -> bytes:
    """One file of all the samples."""
    size = sum(len(sound.data) for sound in sounds)
    return b"".join((wav_head(sounds[0].form, size), *(sound.data for sound in sounds), b"\0" * (size % 2)))


def check_format(name: str) -> None:
    """Raise InvalidField for a format that this server cannot make."""
    if name in ENCODED and not has_encoder():
        raise InvalidField(
            "response_format",
            f"response_format {name} needs soundfile on the server (pip install 'flambeau[audio]'); ask for wav or pcm",
        )


@functools.cache
def has_encoder() -> bool:
    return importlib.util.find_spec("soundfile") is not None


def check_pcm(sound: Sound, model: str) -> None:
    """Raise InvalidField unless the samples are what clients take `pcm` for."""
    channels, rate, bits = sound.shape
    if (sound.kind, channels, rate, bits) != (PCM, 1, PCM_RATE, 16):
        raise InvalidField(
            "response_format",
            f"pcm has whole numbers of 16 bits, 1 channel and {PCM_RATE} samples per second, but {model!r} makes "
            f"{words_of(sound)}; ask for wav, whose header says so",
        )


class SoundEncoder:
    """Turns WAV files into other formats, a few at a time, each in a process."""

    def __init__(self, max_processes: int = MAX_PROCESSES) -> None:
        self._places = asyncio.Semaphore(max_processes)

    async def encode(self, file: bytes, name: str) -> bytes:
        """A WAV file in another format. Raises JobFailed."""
        try:
            async with asyncio.timeout(ENCODING_S), self._places:
                return await run_encoder(file, name)
        except TimeoutError:
            reason = f"it took more than {ENCODING_S:g} s"
        except OSError as error:  # no process could be started
            reason = str(error)
        raise JobFailed(f"the sound cannot be encoded as {name}: {reason}; ask for wav", status=500)


async def run_encoder(file: bytes, name: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", ENCODER, name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        found, problem = await process.communicate(file)
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        lines = problem.decode("utf-8", "replace").strip().splitlines()
        raise OSError(lines[-1] if lines else f"its encoder exited with {process.returncode}")
    return found
