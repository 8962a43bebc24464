"""Voice activity detection: a WAV file → where somebody speaks, with silero-vad as TorchScript or ONNX.

Shapes: B recordings, N samples of one chunk and what precedes it.
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

CHUNK_S = 0.032  # the model hears so much at a time: 512 samples at 16 kHz, 256 at 8 kHz
PRECEDING_S = 0.004  # and, before each chunk, the end of the one before
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
    """When speech begins and ends; the `handler` section of model-config.yaml."""

    threshold: float = 0.5
    hysteresis: float = 0.15  # speech goes on until the probability is so far below the threshold
    min_speech_ms: float = 250
    min_silence_ms: float = 100
    padding_ms: float = 30


class VoiceActivityHandler(BaseHandler):
    """Answers each recording with a list of {"start": seconds, "end": seconds}."""

    def initialize(self, context):
        """Load either form of the model."""
        self.settings = Settings(**context.model_yaml_config.get("handler", {}))
        torch.set_num_threads(1)  # a step is so small that threads would wait for each other longer than they compute
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
        """One step of the ONNX model, which wants to be told the rate."""
        return lambda x_BN, state: self.model(x_BN, state, torch.tensor(rate))  # noqa: N803

    def preprocess(self, data):
        """Rows → recordings."""
        return [read_wav(row.get("data") or row.get("body")) for row in data]

    def inference(self, data):
        """Recordings → for each, the probability of speech in each chunk; those of one rate run side by side."""
        found = {}
        for rate in RATES:
            places = [i for i, recording in enumerate(data) if recording.rate == rate]
            if places:
                found |= zip(places, self.listen([data[i] for i in places], rate), strict=True)
        return [(recording, found[i]) for i, recording in enumerate(data)]

    def listen(self, recordings: Sequence[Recording], rate: int) -> list[list[float]]:
        """The probabilities of recordings of one rate. All that the model remembers is in here, nothing in `self`."""
        size, before = round(CHUNK_S * rate), round(PRECEDING_S * rate)
        counts = [-(-len(recording.samples) // size) for recording in recordings]
        samples = np.zeros((len(recordings), before + max(counts) * size), np.float32)
        for row, recording in zip(samples, recordings, strict=True):
            row[before : before + len(recording.samples)] = recording.samples
        audio = torch.from_numpy(samples).to(self.device)
        state = torch.zeros(STATE_SIZE[0], len(recordings), STATE_SIZE[1], device=self.device)
        columns = []
        with torch.inference_mode():
            for i in range(max(counts)):
                chance, state = self.steps[rate](audio[:, i * size : before + (i + 1) * size], state)
                columns.append(chance[:, 0])
        rows = torch.stack(columns, 1).tolist()
        return [row[:count] for row, count in zip(rows, counts, strict=True)]

    def postprocess(self, data):
        """Probabilities → segments."""
        return [find_speech(chances, recording.duration_s, self.settings) for recording, chances in data]


def read_wav(raw: object) -> Recording:
    """The recording in a WAV file, or the reason why it cannot be heard."""
    if not isinstance(raw, (bytes, bytearray)) or not raw:
        raise BadRequest(f"there is no audio in the request; {REMEDY}")
    try:
        with wave.open(io.BytesIO(raw)) as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise BadRequest(
            f"the audio is not a WAV file that can be read ({error or 'it is cut short'}); {REMEDY}"
        ) from None
    if (channels, width) != (1, 2) or rate not in RATES:
        raise BadRequest(f"the audio has {channels} channels of {8 * width} bits at {rate} Hz; {REMEDY}")
    samples = np.frombuffer(frames[: len(frames) // 2 * 2], "<i2")
    if not len(samples):
        raise BadRequest(f"the WAV file has no samples; {REMEDY}")
    return Recording(rate, samples.astype(np.float32) / 32_768)


def find_speech(chances: Sequence[float], duration_s: float, settings: Settings) -> list[dict[str, float]]:
    """Stretches of speech that are long enough, a little widened, without overlap."""
    padding_s = settings.padding_ms / 1000
    found: list[dict[str, float]] = []
    for first, last in stretches(chances, settings):
        if (last - first) * CHUNK_S * 1000 < settings.min_speech_ms:
            continue
        start = max(0.0, first * CHUNK_S - padding_s)
        if found:
            start = max(start, found[-1]["end"])
        found.append({"start": round(start, 3), "end": round(min(duration_s, last * CHUNK_S + padding_s), 3)})
    return found


def stretches(chances: Sequence[float], settings: Settings) -> Iterator[tuple[int, int]]:
    """Runs of chunks with speech, (first, one past the last); a pause shorter than the minimum does not end one."""
    patience = settings.min_silence_ms / 1000 / CHUNK_S
    first, last = None, 0
    for i, chance in enumerate(chances):
        if chance >= settings.threshold - (0 if first is None else settings.hysteresis):
            first, last = i if first is None else first, i + 1
        elif first is not None and i + 1 - last >= patience:
            yield first, last
            first = None
    if first is not None:
        yield first, last
