"""Speech recognition: predictions, and the transcripts of /v1/audio."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from flambeau.errors import BadRequest
from flambeau.handlers.onnx.npy import Array
from flambeau.handlers.pretrained.audio import read_audio
from flambeau.handlers.pretrained.audio_tasks import AudioTask
from flambeau.handlers.pretrained.generated_text import GENERATION, check_generation, with_limit
from flambeau.handlers.pretrained.task_request import Kind, TaskRequest
from flambeau.handlers.pretrained.transcript_stream import TranscriptStream

WHISPER_TOKENIZER = "transformers.models.whisper.tokenization_whisper"


class CtcRecognition(AudioTask):
    """Speech to text with one output per frame (wav2vec 2.0, HuBERT and others)."""

    known: ClassVar[Mapping[str, Kind]] = {}
    abilities = ("transcribe",)

    def load(self) -> Any:
        self.tokenizer = self.runtime.load_part("AutoTokenizer")
        return self.runtime.load_model("AutoModelForCTC")

    def prepare(self, request: TaskRequest) -> list[Any]:
        order = request.transcription or {}
        if order.get("task") == "translate":
            raise BadRequest("the model writes down speech, and translates nothing; use /v1/audio/transcriptions")
        if order.get("timestamps"):
            raise BadRequest("the model gives no timestamps here; ask for the response_format json or text")
        for name in ("language", "prompt", "temperature"):
            if order.get(name):
                raise BadRequest(f"{name} has no effect on this model, which has one output per frame; leave it out")
        return super().prepare(request)

    def reply(self, request: TaskRequest, inputs: Sequence[Any], outputs: Sequence[Array]) -> Any:
        texts = [self.tokenizer.decode(logits.argmax(-1), skip_special_tokens=False) for logits in outputs]
        if request.transcription is not None:
            return {"text": texts[0], "duration": inputs[0]["duration"]}
        replies = [{"text": text} for text in texts]
        return replies if request.is_many else replies[0]


class GeneratedTranscript(AudioTask):
    """Speech to text with a decoder (Whisper and others); longer sounds than its window are generated in parts."""

    known: ClassVar[Mapping[str, Kind]] = {**GENERATION, "language": "text", "task": ("transcribe", "translate")}
    abilities = ("transcribe",)

    def load(self) -> Any:
        self.tokenizer = self.runtime.load_part("AutoTokenizer")
        self.streaming = threading.Lock()  # generate() of one model runs in one thread
        return self.runtime.load_model("AutoModelForSpeechSeq2Seq", generates=True)

    def prepare(self, request: TaskRequest) -> list[Any]:
        if request.transcription is not None:
            return [self.transcription(read_audio(request.inputs, self.rate), request.transcription)]
        given = {name: value for name, value in request.parameters.items() if value is not None}
        languages: dict[str, Any] = {name: given.pop(name) for name in ("language", "task") if name in given}
        self.check_languages(languages)
        check_generation(given, self.runtime.max_new_tokens)
        settings = tuple(sorted((given | languages).items()))
        return [{**entry, "settings": settings} for entry in super().prepare(request)]

    def check_languages(self, given: Mapping[str, Any]) -> None:
        config = self.model.generation_config
        if given and not getattr(config, "is_multilingual", False):
            raise BadRequest(f"the model knows one language; leave {' and '.join(given)} out")
        language, known = given.get("language"), getattr(config, "lang_to_id", None)
        if language is not None and known and f"<|{language_code(language)}|>" not in known:
            codes = ", ".join(sorted(name.strip("<|>") for name in known)[:20])
            raise BadRequest(f"language {language[:40]!r} is not one of the model's: {codes}, …")

    # ---- transcripts for /v1/audio ----

    def transcription(self, samples: Array, order: Mapping[str, Any]) -> dict[str, Any]:
        """The entry of a sound; with timestamps it keeps its samples, and runs alone."""
        languages = {"language": language_code(order["language"])} if order.get("language") else {}
        if order["task"] == "translate":
            languages["task"] = "translate"
        self.check_languages(languages)
        settings: dict[str, Any] = {"task": "transcribe", **languages} if languages else {}
        if order.get("temperature"):
            settings |= {"do_sample": True, "temperature": order["temperature"]}
        if order.get("prompt"):
            settings["prompt_ids"] = self.prompt_ids(order["prompt"])
        entry: dict[str, Any] = {"duration": len(samples) / self.rate, "settings": tuple(sorted(settings.items()))}
        if not order["timestamps"]:
            entry |= self.features(samples)
            is_streamed = order.get("stream") and self.can_stream(is_long="is_long" in entry)
            return {**entry, "stream": True} if is_streamed else entry
        self.check_timestamps(order["timestamps"])
        if len(order["timestamps"]) > 1 and order.get("temperature"):
            raise BadRequest(
                "with a temperature above 0 the text of the segments is not that of the words; ask for one of them"
            )
        return {**entry, "samples": samples, "timestamps": order["timestamps"]}

    def can_stream(self, *, is_long: bool) -> bool:
        """Whether it is known which of the tokens that generate() makes are those of its result."""
        config = self.model.generation_config
        if is_long and not hasattr(config, "no_timestamps_token_id"):
            return False
        return (config.num_beams or 1) == 1 and getattr(config, "no_speech_threshold", None) is None

    def prompt_ids(self, prompt: str) -> tuple[int, ...]:
        """The tokens of a prompt; of a long one the last, as many as the decoder has room for."""
        if not hasattr(self.tokenizer, "get_prompt_ids"):
            raise BadRequest("the model takes no prompt; leave it out")
        try:
            first, *rest = self.tokenizer.get_prompt_ids(prompt).tolist()
        except ValueError as error:  # a special token in it
            raise BadRequest(f"the prompt cannot be used: {error}") from None
        room = self.model.config.max_target_positions // 2 - 1
        return (first, *rest[-room:])

    def check_timestamps(self, kinds: Sequence[str]) -> None:
        if not hasattr(self.model.generation_config, "no_timestamps_token_id"):
            raise BadRequest("the model gives no timestamps; ask for the response_format json or text")
        if "word" in kinds and not getattr(self.model.generation_config, "alignment_heads", None):
            raise BadRequest(
                "the model gives no times of words: its generation_config.json has no alignment_heads; ask for segments"
            )

    def timed(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """A transcript with the times of its segments, its words or both, by transformers' own pipeline."""
        # The pipeline has five beams where the model's files name no number; the text must not depend on the format.
        settings = {"num_beams": self.model.generation_config.num_beams or 1, **self.arguments(entry)}
        if "language" not in settings and getattr(self.model.generation_config, "is_multilingual", False):
            settings["language"] = self.detect_language(entry["samples"])
            settings.setdefault("task", "transcribe")
        found: dict[str, Any] = {"language": language_name(settings.get("language", "en"))}
        kinds = {"segment": ("segments", "text", True), "word": ("words", "word", "word")}
        for name, label, argument in (kinds[kind] for kind in entry["timestamps"]):
            result = self.pipeline(entry["samples"].copy(), return_timestamps=argument, generate_kwargs=dict(settings))
            found.setdefault("text", result["text"])
            found[name] = [
                {label: chunk["text"], **times_of(chunk["timestamp"], entry["duration"])} for chunk in result["chunks"]
            ]
        return found

    def pipeline(self, samples: Array, **options: Any) -> dict[str, Any]:
        transformers = importlib.import_module("transformers")
        made = transformers.AutomaticSpeechRecognitionPipeline(
            model=self.model, tokenizer=self.tokenizer, feature_extractor=self.extractor, device=self.runtime.device
        )
        found: dict[str, Any] = made({"raw": samples, "sampling_rate": self.rate}, **options)
        return found

    def detect_language(self, samples: Array) -> str:
        window = samples[: getattr(self.extractor, "n_samples", len(samples))]
        batch = self.join([super().features(window)])
        with torch.inference_mode():
            token = int(self.model.detect_language(input_features=batch["input_features"])[0])
        names: Mapping[str, int] = self.model.generation_config.lang_to_id
        return next(name.strip("<|>") for name, own in names.items() if own == token)

    # ---- the network ----

    def features(self, samples: Array) -> dict[str, Any]:
        window = getattr(self.extractor, "n_samples", None)
        if window is None or len(samples) <= window:
            return super().features(samples)
        options = {"truncation": False, "padding": "longest", "return_attention_mask": True}
        found: Mapping[str, Any] = self.extractor(samples, sampling_rate=self.rate, return_tensors="pt", **options)
        return {**found, "is_long": True}

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        plain = iter(super().run([entry for entry in inputs if not entry.keys() & {"samples", "stream"}]))
        return [
            self.timed(entry) if "samples" in entry else self.pieces(entry) if "stream" in entry else next(plain)
            for entry in inputs
        ]

    def pieces(self, entry: Mapping[str, Any]) -> Iterator[dict[str, str]]:
        """The transcript of a sound as it is generated; one sound at a time."""
        config = self.model.generation_config
        begin = config.no_timestamps_token_id + 1 if entry.get("is_long") else None
        eos_ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        stream = TranscriptStream(partial(self.tokenizer.decode, skip_special_tokens=True), eos_ids, begin)

        def generate() -> str:
            with self.streaming:
                return str(self.forward([entry], streamer=stream)[0])

        for text in stream.texts(generate):
            yield {"text": text}

    def forward(self, entries: Sequence[Mapping[str, Any]], **options: Any) -> list[Any]:
        batch = self.join(entries)
        settings = self.arguments(entries[0])
        if entries[0].get("is_long"):
            settings["return_timestamps"] = True  # the next window begins where the last sentence ended
        with torch.inference_mode():
            tokens = self.model.generate(**batch, **settings, **options)
        return [*self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    def arguments(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of generate()."""
        given = dict(entry["settings"])
        if "prompt_ids" in given:
            given["prompt_ids"] = torch.tensor(given["prompt_ids"]).to(self.runtime.device)
        return with_limit(self.model.generation_config, given, self.runtime.max_new_tokens)

    def reply(self, request: TaskRequest, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        if request.transcription is not None:
            if inspect.isgenerator(outputs[0]):
                return outputs[0]
            found = outputs[0] if isinstance(outputs[0], dict) else {"text": outputs[0]}
            return {**found, "duration": inputs[0]["duration"]}
        replies = [{"text": text} for text in outputs]
        return replies if request.is_many else replies[0]


def language_code(language: str) -> str:
    """The code of a language that is given by its name or its code."""
    names = importlib.import_module(WHISPER_TOKENIZER).TO_LANGUAGE_CODE
    return str(names.get(language.lower(), language.lower()))


def language_name(code: str) -> str:
    return str(importlib.import_module(WHISPER_TOKENIZER).LANGUAGES.get(code, code))


def times_of(timestamp: tuple[float | None, float | None], duration: float) -> dict[str, float]:
    """Start and end in seconds; a model may leave the end of its last segment open."""
    start, end = timestamp
    return {"start": start or 0.0, "end": duration if end is None else end}
