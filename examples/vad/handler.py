"""Voice activity detection: finds speech in a WAV file, with silero-vad as TorchScript or ONNX.

Shapes: B recordings, N samples of a chunk with its context.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from flambeau.errors import BadRequest
from flambeau.handlers.base import BaseHandler

CHUNK_S = 0.032  # input of one step: 512 samples at 16 kHz, 256 at 8 kHz
CONTEXT_S = 0.004  # end of the previous chunk, which is put before each chunk
RATES = (16_000, 8_000)
STATE_SIZE = (2, 128)
REMEDY = "send a WAV file with one channel of 16-bit PCM at 16 or 8 kHz"

Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Recording:
    """The samples of one request, from -1 to 1."""

    rate: int
    samples: np.ndarray

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.rate


@dataclass(frozen=True)
class Settings:
    """Thresholds for speech; the `handler` section of model-config.yaml."""

    threshold: float = 0.5
    hysteresis: float = 0.15  # speech ends when the probability is this much below the threshold
    min_speech_ms: float = 250
    min_silence_ms: float = 100
    padding_ms: float = 30


class VoiceActivityHandler(BaseHandler):
    """Returns a list of {"start": seconds, "end": seconds} for each recording."""

    def initialize(self, context):
        self.settings = Settings(**context.model_yaml_config.get("handler", {}))
        torch.set_num_threads(1)  # a step is too small to gain from threads
        name = context.manifest["model"]["serializedFile"]
        if not name.endswith(".onnx"):
            super().initialize(context)
            self.steps = {16_000: self.model._model, 8_000: self.model._model_8k}
            return
        from flambeau.handlers.onnx.session import open_session

        self.device = torch.device("cpu")
        path = Path(context.system_properties["model_dir"]) / name
        self.model = open_session(path, use_cuda=False, threads=1)
        self.steps = {rate: self.onnx_step(rate) for rate in RATES}
        self.initialized = True

    def onnx_step(self, rate: int) -> Step:
        """One step of the ONNX model, which has the rate as an input."""
        return lambda x_BN, state: self.model(x_BN, state, torch.tensor(rate))  # noqa: N803

    def preprocess(self, data):
        return [read_wav(row.get("data") or row.get("body")) for row in data]

    def inference(self, data):
        """The probability of speech in each chunk of each recording; recordings of one rate run as one batch."""
        found = {}
        for rate in RATES:
            indices = [i for i, recording in enumerate(data) if recording.rate == rate]
            if indices:
                found |= zip(indices, self.run_steps([data[i] for i in indices], rate), strict=True)
        return [(recording, found[i]) for i, recording in enumerate(data)]

    def run_steps(self, recordings: Sequence[Recording], rate: int) -> list[list[float]]:
        """The probabilities of recordings of one rate. The model's state is local, as `self` serves many clients."""
        size, before = round(CHUNK_S * rate), round(CONTEXT_S * rate)
        counts = [-(-len(recording.samples) // size) for recording in recordings]
        samples = np.zeros((len(recordings), before + max(counts) * size), np.float32)
        for row, recording in zip(samples, recordings, strict=True):
            row[before : before + len(recording.samples)] = recording.samples
        audio = torch.from_numpy(samples).to(self.device)
        state = torch.zeros(STATE_SIZE[0], len(recordings), STATE_SIZE[1], device=self.device)
        columns = []
        with torch.inference_mode():
            for i in range(max(counts)):
                probability, state = self.steps[rate](audio[:, i * size : before + (i + 1) * size], state)
                columns.append(probability[:, 0])
        rows = torch.stack(columns, 1).tolist()
        return [row[:count] for row, count in zip(rows, counts, strict=True)]

    def postprocess(self, data):
        return [find_speech(probabilities, recording.duration_s, self.settings) for recording, probabilities in data]


def read_wav(raw: object) -> Recording:
    """Read a WAV file; BadRequest says why it cannot be used."""
    if not isinstance(raw, (bytes, bytearray)) or not raw:
        raise BadRequest(f"there is no audio in the request; {REMEDY}")
    try:
        with wave.open(io.BytesIO(raw)) as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise BadRequest(
            f"the audio is not a WAV file that can be read ({error or 'it is truncated'}); {REMEDY}"
        ) from None
    if (channels, width) != (1, 2) or rate not in RATES:
        raise BadRequest(f"the audio has {channels} channels of {8 * width} bits at {rate} Hz; {REMEDY}")
    samples = np.frombuffer(frames[: len(frames) // 2 * 2], "<i2")
    if not len(samples):
        raise BadRequest(f"the WAV file has no samples; {REMEDY}")
    return Recording(rate, samples.astype(np.float32) / 32_768)


def find_speech(probabilities: Sequence[float], duration_s: float, settings: Settings) -> list[dict[str, float]]:
    """Segments of speech of the minimum length, padded, without overlap."""
    padding_s = settings.padding_ms / 1000
    found: list[dict[str, float]] = []
    for first, last in segments(probabilities, settings):
        if (last - first) * CHUNK_S * 1000 < settings.min_speech_ms:
            continue
        start = max(0.0, first * CHUNK_S - padding_s)
        if found:
            start = max(start, found[-1]["end"])
        found.append({"start": round(start, 3), "end": round(min(duration_s, last * CHUNK_S + padding_s), 3)})
    return found


def segments(probabilities: Sequence[float], settings: Settings) -> Iterator[tuple[int, int]]:
    """Runs of chunks with speech, (first, one past the last); a pause below the minimum does not end a run."""
    min_silence = settings.min_silence_ms / 1000 / CHUNK_S
    first, last = None, 0
    for i, probability in enumerate(probabilities):
        if probability >= settings.threshold - (0 if first is None else settings.hysteresis):
            first, last = i if first is None else first, i + 1
        elif first is not None and i + 1 - last >= min_silence:
            yield first, last
            first = None
    if first is not None:
        yield first, last
