"""Text to speech: predictions, and the speech of /v1/audio, with VITS (MMS and others)."""

from __future__ import annotations

import importlib.util
import io
import re
import unicodedata
import wave
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.loaders.pretrained import Runtime
from flambeau.handlers.onnx.npy import Array
from flambeau.handlers.pretrained.audio import resample
from flambeau.handlers.pretrained.task import Task, to_array
from flambeau.handlers.pretrained.task_request import Kind, TaskRequest, read_text, shorten

LEAST_RATE = 24_000  # samples per second: what clients of /v1/audio/speech expect of `pcm`
SPEEDS = (0.25, 4.0)
MAX_CHARACTERS = 4096
SENTENCE_END = re.compile(r"(?<=[.!?;:])\s+|(?<=[。！？])|\n+")
DEFAULT_VOICE = "default"


class TextToSpeech(Task):
    """Speaks a text sentence by sentence; each is a call of the network."""

    known: ClassVar[Mapping[str, Kind]] = {"voice": "text", "speed": "number", "instructions": "text"}
    abilities = ("speak",)

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.tokenizer = runtime.load_part("AutoTokenizer")
        self.model = runtime.load_model("AutoModelForTextToWaveform", generates=True)
        self.config = self.model.config
        if self.config.model_type != "vits":
            raise HandlerError(f"text-to-speech needs a VITS model, not {self.config.model_type}; write a handler.py")
        if self.tokenizer.phonemize and importlib.util.find_spec("phonemizer") is None:
            raise HandlerError("the model reads phonemes: pip install phonemizer, and install espeak")
        self.rate = max(self.config.sampling_rate, LEAST_RATE)

    def prepare(self, request: TaskRequest) -> list[Any]:
        order = request.speech
        if order is None:
            if request.is_many:
                raise BadRequest("a reply holds one sound; send one text as inputs")
            order = {"input": request.inputs, **request.parameters}
        text = read_text(order["input"])
        if len(text) > MAX_CHARACTERS:
            raise BadRequest(f"the text has {len(text)} characters; send at most {MAX_CHARACTERS}")
        if order.get("instructions"):
            raise BadRequest("instructions have no effect on this model; leave them out")
        speed = 1.0 if order.get("speed") is None else order["speed"]
        if not SPEEDS[0] <= speed <= SPEEDS[1]:
            raise BadRequest(f"speed must be from {SPEEDS[0]} to {SPEEDS[1]}, not {speed}")
        sentences = self.encode(text)
        return [{"sentences": sentences, "speaker": self.speaker_of(order.get("voice")), "speed": speed}]

    def speaker_of(self, voice: str | None) -> int:
        """The number of a voice; voices have no names."""
        number = self.config.num_speakers
        if voice in (None, DEFAULT_VOICE):
            return 0
        if voice.isascii() and voice.isdecimal() and len(voice) < 10 and int(voice) < number:
            return int(voice)
        known = f"{DEFAULT_VOICE} or 0 … {number - 1}" if number > 1 else DEFAULT_VOICE
        raise BadRequest(f"there is no voice {shorten(voice)}; send {known}")

    def encode(self, text: str) -> list[torch.Tensor]:
        """The tokens of each sentence. What the vocabulary lacks is refused, unless it is punctuation."""
        self.check_letters(text)
        sentences = [self.tokenizer(each, return_tensors="pt")["input_ids"] for each in SENTENCE_END.split(text)]
        least = 1 if self.tokenizer.add_blank else 0  # tokens of an empty text
        found = [ids for ids in sentences if ids.shape[-1] > least]
        if not found:
            raise BadRequest("the text has nothing to say: no letter that the model's vocabulary has")
        return found

    def check_letters(self, text: str) -> None:
        is_romanized = self.tokenizer.is_uroman and importlib.util.find_spec("uroman") is not None
        if self.tokenizer.phonemize or is_romanized:
            return
        vocabulary = self.tokenizer.encoder
        for character in text:
            is_said = unicodedata.category(character)[0] in "LN"
            if is_said and character not in vocabulary and not all(low in vocabulary for low in character.lower()):
                hint = "pip install uroman on the server" if self.tokenizer.is_uroman else "write it in other letters"
                raise BadRequest(f"the model cannot say {character!r}, which its vocabulary lacks; {hint}")

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        return [self.sounds(entry) for entry in inputs]

    def sounds(self, entry: Mapping[str, Any]) -> Iterator[Array]:
        """The samples of each sentence."""
        speaker = {"speaker_id": entry["speaker"]} if self.config.num_speakers > 1 else {}
        for ids in entry["sentences"]:
            self.model.speaking_rate = self.config.speaking_rate * entry["speed"]
            with torch.inference_mode():
                found = self.model(input_ids=ids.to(self.runtime.device), **speaker)
            yield resample(to_array(found.waveform[0]), self.config.sampling_rate, self.rate)

    def reply(self, request: TaskRequest, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        if request.speech is not None:
            return (to_wav(samples, self.rate) for samples in outputs[0])
        return to_wav(np.concatenate([*outputs[0]]), self.rate)

    def describe(self) -> dict[str, Any]:
        return {"samplingRate": self.rate, "voices": self.config.num_speakers}


def to_wav(samples: Array, rate: int) -> bytes:
    """A WAV file of one channel with whole numbers of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, 0, "NONE", ""))
        writer.writeframes((samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes())
    return file.getvalue()
