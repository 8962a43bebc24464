"""`python -m flambeau.frontend.openai.sound_encoder mp3`: encodes the WAV file of its input, with soundfile.

A process of its own: the server needs neither numpy nor a codec, and survives a fault in one.
"""

from __future__ import annotations

import importlib
import io
import sys

FORMATS = {"mp3": ("MP3", "MPEG_LAYER_III"), "flac": ("FLAC", "PCM_16"), "opus": ("OGG", "OPUS")}
BLOCK = 1 << 15  # samples at a time: codecs of libsndfile overflow the stack with more


def encode(file: bytes, name: str) -> bytes:
    soundfile = importlib.import_module("soundfile")
    kind, subtype = FORMATS[name]
    made = io.BytesIO()
    with soundfile.SoundFile(io.BytesIO(file)) as sound:
        options = {"samplerate": sound.samplerate, "channels": sound.channels, "format": kind, "subtype": subtype}
        with soundfile.SoundFile(made, "w", **options) as writer:
            for block in sound.blocks(BLOCK, dtype="int16"):
                writer.write(block)
    return made.getvalue()


if __name__ == "__main__":
    sys.stdout.buffer.write(encode(sys.stdin.buffer.read(), sys.argv[1]))
