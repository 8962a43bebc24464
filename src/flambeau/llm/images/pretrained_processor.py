"""PretrainedProcessor: an image → what an encoder of transformers takes, and the text that stands for it in a prompt.

Both come from the processor of transformers that belongs to the checkpoint. Pillow resizes wherever transformers has a
variant for it; others need torchvision.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flambeau.llm.errors import CheckpointError
from flambeau.llm.images.image_files import ImageFile, check_side, not_encoded, open_image, size_of
from flambeau.llm.images.image_processor import ResizedImage
from flambeau.llm.images.pixtral_processor import PixtralProcessor
from flambeau.llm.json_files import read_object
from flambeau.llm.models.vision_architecture import TOKEN_IDS, PretrainedVision
from flambeau.llm.transformers_package import first_lines, import_transformers, quiet

if TYPE_CHECKING:
    from PIL.Image import Image

OFFSETS = "text_replacement_offsets"  # what transformers calls the texts in the places of images
SETTINGS = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")  # name the processor's class
TRIAL_SIZE = (48, 64)  # height and width of the image that is read when a model is loaded
NUM_SIZES = 1024  # of images whose texts are kept
ASKING_FOR_VIDEOS = ("MiniCPMV4_6Processor", "MiniCPMOcrProcessor")  # for settings that those of images have, too


class MissingPackage(CheckpointError):
    """Images cannot be read before a package is installed."""


class PretrainedProcessor:
    """Reads images with a processor of transformers."""

    def __init__(self, processor: Any, arch: PretrainedVision) -> None:
        # What the chat template writes for an image.
        self.marker: str = getattr(processor, "image_placeholder_token", None) or processor.image_token
        self.reads_one = arch.reader.reads_one
        self.system_prompt = system_prompt(processor)
        self._processor, self._reader = processor, arch.reader
        self._ids, self._has_more = arch.ids, bool(arch.more_ids)
        self._image_token: str = processor.tokenizer.convert_ids_to_tokens(arch.image_id)
        self.tokens: list[str] = [processor.tokenizer.convert_ids_to_tokens(one) for one in sorted(arch.ids)]
        self._text_of_size = lru_cache(NUM_SIZES)(self._make_text)

    def read(self, file: ImageFile) -> ResizedImage:
        with named(file):
            found = self._run([open_image(file)], return_tensors="pt")
        pixels = found["pixel_values"]
        rows, columns = found["image_grid_thw"][0, 1:].tolist() if self._reader.has_grid else (0, 0)
        return ResizedImage(
            pixels=lambda: pixels,
            grid=(rows, columns) if self._reader.has_grid else None,
            merge_size=self._processor.image_processor.merge_size if self._reader.has_grid else 1,
            more={name: found[name] for name in self._reader.inputs if name in found} | self._token_ids(file),
            num_tokens=self.num_tokens(file),
        )

    def num_tokens(self, file: ImageFile) -> int:
        text = self.text_of(file)
        return sum(map(text.count, self.tokens))

    def _token_ids(self, file: ImageFile) -> dict[str, torch.Tensor]:
        """The tokens of its text that the encoder embeds, where these differ."""
        if not self._has_more:
            return {}
        ids = self._processor.tokenizer(self.text_of(file), add_special_tokens=False)["input_ids"]
        return {TOKEN_IDS: torch.tensor([one for one in ids if one in self._ids])}

    def text_of(self, file: ImageFile, number: int = 0) -> str:
        """What stands for the image in a prompt, by its size and by how many are before it in the chat."""
        with named(file):
            return self._numbered(self._text_of_size(size_of(file)), number)

    def _numbered(self, text: str, number: int) -> str:
        """The text of a first image, for a later one; MiniCPM's say their number."""
        begin, end = (getattr(self._processor, f"image_id_{name}_token", "") for name in ("start", "end"))
        first = f"{begin}0{end}"
        return f"{begin}{number}{end}{text.removeprefix(first)}" if begin and text.startswith(first) else text

    def _make_text(self, size: tuple[int, int]) -> str:
        from PIL import Image

        return self._texts([Image.new("RGB", size[::-1])])[0]

    def _texts(self, images: list[Image]) -> list[str]:
        options: dict[str, Any] = {"images_kwargs": {"return_tensors": "pt"}} if self._reader.counts_in_tensors else {}
        found = self._run(images, add_special_tokens=False, **{f"return_{OFFSETS}": True}, **options)
        if OFFSETS in found:
            [texts] = found[OFFSETS]
            return [str(replaced["replacement"]) for replaced in texts]
        [ids] = found["input_ids"]  # by a processor that does not tell
        text = str(self._processor.tokenizer.decode(ids, skip_special_tokens=False))
        if self._processor.tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise ValueError(f"the processor writes tokens for an image that no text has, such as {text[:100]}")
        return [text]

    def _run(self, images: list[Image], **options: Any) -> Any:
        text = [self.marker * len(images)]
        with torch.inference_mode():
            return self._processor(images=images, text=text, return_mm_token_type_ids=False, **options)

    def try_out(self) -> None:
        """Read a trial image; raises if settings are missing, or are those of another model."""
        from PIL import Image

        if self._image_token not in (text := self._make_text(TRIAL_SIZE)):
            raise ValueError(f"the processor writes no {self._image_token} for an image, but {text[:100]}")
        if not self.reads_one:
            two = "".join(self._texts([Image.new("RGB", TRIAL_SIZE[::-1])] * 2))
            if two != text + self._numbered(text, 1):
                raise ValueError(f"the processor writes {two[:200]} for two images, and {text[:100]} for one")


def system_prompt(processor: Any) -> str:
    """What a processor writes before every chat, whatever the chat template is (Janus)."""
    if not getattr(processor, "use_default_system_prompt", False):
        return ""
    return str(importlib.import_module(type(processor).__mro__[1].__module__).DEFAULT_SYSTEM_PROMPT)


@contextmanager
def named(file: ImageFile) -> Iterator[None]:
    """Raise InvalidRequest for an image that the processor does not take, such as one that is too narrow."""
    check_side(file)
    try:
        yield
    except ValueError as error:
        raise not_encoded(file, error) from None


def read_pretrained_processor(folder: Path, arch: PretrainedVision) -> PretrainedProcessor:
    """Raises MissingPackage where one is needed, and CheckpointError for files that do not describe a processor."""
    transformers = import_images(arch)
    name = class_name(folder, arch)
    for package, is_needed in (("torchvision", arch.reader.needs_torchvision), ("timm", arch.reader.needs_timm)):
        if is_needed and importlib.util.find_spec(package) is None:
            raise MissingPackage(f"{name} of transformers needs {package}: pip install {package}")
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet():
            parts = {
                "image_processor": transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", **options),
                "tokenizer": transformers.AutoTokenizer.from_pretrained(folder, **options),
            }
            processor = PretrainedProcessor(make_processor(folder, name, parts), arch)
            processor.try_out()
    except ImportError as error:
        raise MissingPackage(f"{name} of transformers needs a package: {first_lines(error)}") from error
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"transformers cannot read images with the settings in {folder} ({name}): {first_lines(error)}; copy its "
            "preprocessor_config.json, processor_config.json and the files of its tokenizer from the model's source, "
            "or set read_images: false to serve it for text alone"
        ) from error
    return processor


def import_images(arch: PretrainedVision) -> Any:
    return import_class(arch.reader.class_name, arch.reader.since, "which encodes its images")


def import_class(name: str, since: tuple[int, int], purpose: str) -> Any:
    """transformers; raises MissingPackage if it is not there, or too old for a class."""
    try:
        transformers = import_transformers(purpose)
    except CheckpointError as error:
        raise MissingPackage(str(error)) from error
    version = transformers.__version__
    if tuple(map(int, version.split(".")[:2])) < since or not hasattr(transformers, name):
        first = ".".join(map(str, since))
        raise MissingPackage(
            f"the transformers package, {purpose}, is {version}, and {name} needs {first} or later: "
            f"pip install 'transformers>={first}'"
        )
    return transformers


def class_name(folder: Path, arch: PretrainedVision) -> str:
    """The processor that the files name, or that of the family; others were not compared."""
    known = arch.reader.processors
    files = [folder / name for name in SETTINGS if (folder / name).is_file()]
    named = [str(found) for file in files if (found := read_object(file, CheckpointError).get("processor_class"))]
    if named and named[0] not in known:
        raise CheckpointError(
            f"{folder} names the processor {named[0]}; supported is {' or '.join(known)}. Set read_images: false to "
            "serve the model for text alone"
        )
    return named[0] if named else known[0]


def make_processor(folder: Path, name: str, parts: Mapping[str, Any]) -> Any:
    """A processor of transformers of these parts; it has no others."""
    if name == PixtralProcessor.__name__:
        file = folder / SETTINGS[0]
        settings = read_object(file, CheckpointError) if file.is_file() else {}
        return PixtralProcessor(parts["image_processor"], parts["tokenizer"], settings)
    cls = without_videos(getattr(importlib.import_module("transformers"), name))
    if name in ASKING_FOR_VIDEOS:
        parts = {"video_processor": parts["image_processor"], **parts}
    settings, _ = cls.get_processor_dict(folder, local_files_only=True)
    return cls.from_args_and_dict([parts.get(part) for part in cls.get_attributes()], settings)


def without_videos(cls: Any) -> Any:
    """The class of a processor that needs none for videos, which may need torchvision, nor for sounds."""

    class Reader(cls):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
            is_left_out = value is None or name == "video_processor"
            return type(value) if is_left_out else super().check_argument_for_proper_class(name, value)

    Reader.__name__ = cls.__name__
    return Reader
