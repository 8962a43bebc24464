"""PretrainedImageEncoder: pixels → the embeddings that stand for an image, by an encoder of transformers.

The model's own class is built without its decoder, and transformers reads the weights that are left: their names in old
and new files are its matter.

Shapes: N tokens of an image · X the decoder's hidden size
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.errors import CheckpointError
from flambeau.llm.images.pretrained_processor import import_images
from flambeau.llm.models.config_keys import HARMLESS
from flambeau.llm.models.hugging_face import read_config
from flambeau.llm.models.sound_architecture import SOUNDS
from flambeau.llm.models.tensor_names import OUTPUTS
from flambeau.llm.models.vision_architecture import IS_VIDEO, TOKEN_IDS, PretrainedVision
from flambeau.llm.models.vision_config import UNUSED
from flambeau.llm.transformers_package import check_present, first_lines, quiet, some_of

logger = logging.getLogger(__name__)

NOT_ENCODERS = (
    "language_model",
    "text_model",
    "lm_head",
    "audio_tower",
    "embed_audio",
    "vqmodel",
    "generation_embeddings",
    "generation_aligner",
    "generation_head",
)  # parts of a model that read no images


class PretrainedImageEncoder:
    """The parts of a model of transformers that encode images."""

    def __init__(self, model: Any, arch: PretrainedVision) -> None:
        self.arch = arch
        self._model = model

    def encode(self, pixels: Tensor, grid: tuple[int, int] | None, more: Mapping[str, Any]) -> Tensor:
        """One image or video to [N, X]."""
        moved = {name: moved_to(pixels, value) if isinstance(value, Tensor) else value for name, value in more.items()}
        token_ids = moved.pop(TOKEN_IDS, None)
        if moved.pop(IS_VIDEO, False) and (encode_videos := self._videos) is not None:
            found = encode_videos(pixel_values_videos=pixels, **moved)
            if not self.arch.reader.adds_features:
                return joined(found.pooler_output) * self.arch.scale
            return with_added(found, self.arch.scale)
        found = self._model.get_image_features(pixel_values=pixels, **moved)
        if self.arch.reader.adds_features:
            return with_added(found, self.arch.scale)
        if self.arch.reader.names_layers:
            return by_layers(found.deepstack_features)
        projects = self.arch.reader.projects
        features = self._model.multi_modal_projector(found.last_hidden_state) if projects else found.pooler_output
        embedded = joined(features) * self.arch.scale
        return embedded if token_ids is None else self._with_others(token_ids, embedded, found)

    @property
    def _videos(self) -> Any:
        """What encodes videos; None: frames are images."""
        found = (getattr(one, "get_video_features", None) for one in (self._model, getattr(self._model, "model", None)))
        return next((one for one in found if one is not None), None)

    def _with_others(self, token_ids: Tensor, embedded: Tensor, found: Any) -> Tensor:
        """The embeddings of the image, and those of tokens between and behind them."""
        is_image = token_ids == self.arch.image_id
        if int(is_image.sum()) != len(embedded):
            return embedded  # of another length than the text: the encoder's caller reports it
        others = token_ids[~is_image]
        rows = embedded.new_empty(len(token_ids), embedded.shape[-1])
        rows[is_image] = embedded
        if hasattr(found, "visual_indicator_features"):  # Ovis 2, in the order of its config.json
            order = torch.tensor(self.arch.more_ids, device=others.device)
            rows[~is_image] = found.visual_indicator_features[(others[:, None] == order).int().argmax(1)]
        else:  # Gemma 3n
            rows[~is_image] = self._model.embed_vision(input_ids=others[None])[0]
        return rows

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        found: Iterator[nn.Parameter] = self._model.parameters(recurse)
        return found


def moved_to(pixels: Tensor, value: Tensor) -> Tensor:
    """A tensor on the device of the pixels, and further pixels in their type."""
    return value.to(pixels.device, pixels.dtype if value.is_floating_point() else None)


def joined(features: Tensor | list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """Embeddings of the tiles of an image, one after another."""
    tiles = [features] if isinstance(features, Tensor) else features
    return torch.cat([tile.reshape(-1, tile.shape[-1]) for tile in tiles])


def with_added(found: Any, scale: float) -> Tensor:
    """Embeddings, and what the first layers add, side by side."""
    return torch.cat([joined(found.pooler_output) * scale, *map(joined, found.deepstack_features)], dim=-1)


def by_layers(features: list[tuple[int, Any]]) -> Tensor:
    """Embeddings, which are zero, and what is added before layers, side by side in their order."""
    layers = [joined(tiles) for _, tiles in sorted(features, key=lambda one: one[0])]
    return torch.cat([torch.zeros_like(layers[0]), *layers], dim=-1)


def load_pretrained_encoder(
    folder: Path, arch: PretrainedVision, names: str, *, device: torch.device, dtype: torch.dtype
) -> PretrainedImageEncoder:
    """The encoder, ready to run; raises CheckpointError if transformers cannot load all of it.

    `names` is a pattern of the names of its weights.
    """
    model, info = load_without(
        folder, arch.reader.class_name, NOT_ENCODERS, import_images(arch), device=device, dtype=dtype
    )
    others = re.compile(f"{SOUNDS.pattern}|{OUTPUTS}")
    unused = [name for name in info["unexpected_keys"] if re.search(names, name) and not others.search(name)]
    if more := sorted(unused):
        logger.warning("%s has weights that the encoder of images does not use: %s", folder, some_of(more))
    return PretrainedImageEncoder(model, arch)


def load_without(
    folder: Path,
    class_name: str,
    others: tuple[str, ...],
    transformers: Any,
    *,
    device: torch.device,
    dtype: torch.dtype,
    setting: str = "read_images",
) -> tuple[Any, Any]:
    """A model of transformers without some of its parts, and what is said of its weights.

    Raises CheckpointError if not all of it is in the files; it names the setting that leaves it out.
    """
    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            config = getattr(config, "thinker_config", config)
            name_unknown_keys(folder, config)
            config.quantization_config = None  # that of the decoder
            del config.quantization_config
            model, info = without_parts(getattr(transformers, class_name), others).from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # check_present names them
                output_loading_info=True,
            )
    except (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"transformers cannot load the encoder of {folder}: {first_lines(error)}") from error
    try:
        check_present(folder, info)
    except CheckpointError as error:
        raise CheckpointError(f"{error}, or set {setting}: false to serve it without") from None
    return model.to(device).eval().requires_grad_(False), info


def without_parts(cls: Any, others: tuple[str, ...]) -> Any:
    """The class of a model without some parts, such as its decoder: their weights are then not read."""

    class Encoder(cls):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for holder in (self, getattr(self, "model", None)):
                for name in others:
                    if hasattr(holder, name):
                        setattr(holder, name, nn.Module())
            self.all_tied_weights_keys: dict[str, str] = {}  # those of the head and of embeddings

    Encoder.__name__, Encoder.__module__ = cls.__name__, cls.__module__  # by which transformers finds names of weights
    return Encoder


def name_unknown_keys(folder: Path, config: Any) -> None:
    """Name what transformers knows nothing of, so that it has no effect."""
    for section in ("vision_config", "audio_config"):
        given = read_config(folder).get(section) or {}
        own = getattr(config, section, None)
        if own is None:
            continue
        known = type(own)().to_dict().keys() | type(own).attribute_map.keys() | HARMLESS | {*UNUSED}
        if unknown := sorted(given.keys() - known):
            logger.warning(
                "%s in %s has keys that transformers does not know and that have no effect: %s",
                section,
                folder,
                ", ".join(unknown),
            )
