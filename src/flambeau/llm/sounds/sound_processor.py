"""SoundProcessor: a sound → what an encoder of transformers takes, and the text that stands for it in a prompt.

Both come from the processor of transformers that belongs to the checkpoint.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flambeau.llm.errors import CheckpointError, InvalidRequest
from flambeau.llm.images.pretrained_processor import OFFSETS, SETTINGS, MissingPackage, import_class, make_processor
from flambeau.llm.json_files import read_object
from flambeau.llm.models.sound_architecture import SoundArchitecture
from flambeau.llm.models.vision_architecture import TOKEN_IDS
from flambeau.llm.sounds.sound_clip import LONGEST_S, SoundClip, too_long, too_short
from flambeau.llm.sounds.voxtral_processor import VoxtralProcessor, read_voxtral_processor
from flambeau.llm.transformers_package import first_lines, quiet

TRIAL_S = 0.5  # of the sound that is read when a model is loaded
NUM_LENGTHS = 1024  # of sounds whose texts are kept
SHORT_S = 0.1  # a sound that transformers fails for and that is shorter is too short
FAILURES = (IndexError, RuntimeError, TypeError, ValueError)  # of transformers, for sounds that it does not expect


class SoundProcessor:
    """Reads sounds with a processor of transformers."""

    def __init__(self, processor: Any, arch: SoundArchitecture) -> None:
        reader = arch.reader
        self.marker: str = processor.audio_token  # what the chat template writes for a sound
        self.reads_one = reader.reads_one
        self.rate: int = processor.feature_extractor.sampling_rate
        self.longest_s = longest_s(processor, arch)
        tokenizer = processor.tokenizer
        self.tokens: list[str] = [tokenizer.convert_ids_to_tokens(one) for one in sorted(arch.ids)]
        self._sound_token: str = tokenizer.convert_ids_to_tokens(arch.sound_id)
        self._processor, self._arch = processor, arch
        self._text_of_length = lru_cache(NUM_LENGTHS)(self._make_text)

    def text_of(self, sound: SoundClip) -> str:
        """What stands for the sound in a prompt, by its length. Raises InvalidRequest if it is not read."""
        if sound.length_s > self.longest_s:
            raise too_long(sound.name, sound.length_s, self.longest_s)
        try:
            text = self._text_of_length(len(sound.samples))
        except FAILURES as error:
            raise not_read(sound, error) from None
        if self._sound_token not in text:
            raise too_short(sound)
        return text

    def inputs_of(self, sound: SoundClip) -> dict[str, torch.Tensor]:
        """What the encoder takes, by the names of its arguments."""
        text = self.text_of(sound)
        try:
            found = self._run([sound.samples], return_tensors="pt")
        except FAILURES as error:
            raise not_read(sound, error) from None
        inputs = {name: found[name] for name in self._arch.reader.inputs if name in found}
        if self._arch.more_ids:
            ids = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            inputs[TOKEN_IDS] = torch.tensor([one for one in ids if one in self._arch.ids])
        return inputs

    def num_tokens(self, sound: SoundClip) -> int:
        return sum(map(self.text_of(sound).count, self.tokens))

    def _make_text(self, num_samples: int) -> str:
        return self._texts([np.zeros(num_samples, np.float32)])[0]

    def _texts(self, sounds: list[NDArray[np.float32]]) -> list[str]:
        found = self._run(sounds, add_special_tokens=False, **{f"return_{OFFSETS}": True}, return_tensors="pt")
        if OFFSETS in found:
            [texts] = found[OFFSETS]
            return [str(replaced["replacement"]) for replaced in texts]
        ids = found["input_ids"][0].tolist()  # by a processor that does not tell
        text = str(self._processor.tokenizer.decode(ids, skip_special_tokens=False))
        if self._processor.tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise ValueError(f"the processor writes tokens for a sound that no text has, such as {text[:100]}")
        return [text]

    def _run(self, sounds: list[NDArray[np.float32]], **options: Any) -> Any:
        text = [self.marker * len(sounds)]
        with torch.inference_mode():
            return self._processor(text=text, audio=sounds, sampling_rate=self.rate, **options)

    def try_out(self) -> None:
        """Read a trial sound; raises if settings are missing, or are those of another model."""
        trial = np.zeros(int(self.rate * TRIAL_S), np.float32)
        text = self._text_of_length(len(trial))
        if self._sound_token not in text:
            raise ValueError(f"the processor writes no {self._sound_token} for a sound, but {text[:100]}")
        if not self.reads_one and (two := "".join(self._texts([trial] * 2))) != text * 2:
            raise ValueError(f"the processor writes {two[:200]} for two sounds, and {text[:100]} for one")


def not_read(sound: SoundClip, error: Exception) -> InvalidRequest:
    """For a sound that a processor or an encoder of transformers failed for."""
    if sound.length_s < SHORT_S:
        return too_short(sound)
    return InvalidRequest(
        f"{sound.name} is a sound of {sound.length_s:.1f} s, which the model cannot read: {first_lines(error)}; send "
        "one of another length",
        sound.name,
    )


def longest_s(processor: Any, arch: SoundArchitecture) -> float:
    """The longest sound that is read as a whole: transformers cuts others off."""
    reader, extractor = arch.reader, processor.feature_extractor
    limits = [LONGEST_S]
    if reader.has_window:
        limits.append(extractor.n_samples / extractor.sampling_rate)
    if reader.longest_samples is not None:
        limits.append(reader.longest_samples / extractor.sampling_rate)
    if reader.longest_key:
        window_s = float(extractor.chunk_length)
        limits.append(getattr(processor, reader.longest_key) // window_s * window_s)
    return min(limits)


def read_sound_processor(folder: Path, arch: SoundArchitecture) -> SoundProcessor:
    """Raises MissingPackage where one is needed, and CheckpointError for files that do not describe a processor."""
    reader = arch.reader
    transformers = import_sounds(arch)
    check_class(folder, reader.processor)
    if reader.needs_timm and importlib.util.find_spec("timm") is None:
        raise MissingPackage(f"{reader.class_name} of transformers needs timm: pip install timm")
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet():
            extractor = transformers.AutoFeatureExtractor.from_pretrained(folder, **options)
            if reader.processor == VoxtralProcessor.__name__:
                processor = SoundProcessor(read_voxtral_processor(folder, extractor), arch)
            else:
                tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
                parts = {"feature_extractor": extractor, "tokenizer": tokenizer}
                processor = SoundProcessor(make_processor(folder, reader.processor, parts), arch)
            processor.try_out()
    except ImportError as error:
        raise MissingPackage(f"{reader.processor} of transformers needs a package: {first_lines(error)}") from error
    except (AttributeError, KeyError, OSError, *FAILURES) as error:
        raise CheckpointError(
            f"transformers cannot read sounds with the settings in {folder} ({reader.processor}): {first_lines(error)};"
            " copy its preprocessor_config.json, processor_config.json and the files of its tokenizer from the model's "
            "source, or set read_sounds: false to serve it without sounds"
        ) from error
    return processor


def has_extractor(folder: Path) -> bool:
    """Whether the files say how sounds are read; those of a model with images may say that of images alone."""
    files = [folder / name for name in SETTINGS if (folder / name).is_file()]
    return any(
        read_object(file, CheckpointError).keys() & {"feature_extractor", "feature_extractor_type"} for file in files
    )


def import_sounds(arch: SoundArchitecture) -> Any:
    return import_class(arch.reader.class_name, arch.reader.since, "which encodes its sounds")


def check_class(folder: Path, known: str) -> None:
    """Raise if the files name a processor that was not compared."""
    files = [folder / name for name in SETTINGS if (folder / name).is_file()]
    named = [str(found) for file in files if (found := read_object(file, CheckpointError).get("processor_class"))]
    if named and named[0] != known:
        raise CheckpointError(
            f"{folder} names the processor {named[0]}; supported is {known}. Set read_sounds: false to serve the model "
            "without sounds"
        )
