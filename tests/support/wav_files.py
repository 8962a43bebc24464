"""WAV files of a few samples."""

from __future__ import annotations

import io
import wave


def wav_of(data=b"abcd", rate=24_000, channels=1, width=2):
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, width, rate, 0, "NONE", ""))
        writer.writeframes(data)
    return file.getvalue()
