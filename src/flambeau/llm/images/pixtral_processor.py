"""PixtralProcessor: rows of tokens with a token after each, around the image processor of transformers.

transformers has a class of this name, too, which cannot be imported without torchvision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flambeau.llm.errors import CheckpointError

if TYPE_CHECKING:
    from PIL.Image import Image

DEFAULTS: dict[str, Any] = {
    "patch_size": 16,
    "spatial_merge_size": 1,
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
WITHOUT_EFFECT = {"processor_class", "auto_map", "chat_template", "image_processor", "tokenizer"}


class PixtralProcessor:
    """Is called as processors of transformers are, with one image."""

    def __init__(self, image_processor: Any, tokenizer: Any, settings: Mapping[str, Any]) -> None:
        own = {key: value for key, value in settings.items() if value is not None and key not in WITHOUT_EFFECT}
        if unknown := own.keys() - DEFAULTS.keys():
            raise CheckpointError(f"processor_config.json has settings that are not supported: {', '.join(unknown)}")
        given = {**DEFAULTS, **own}
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.image_token: str = given["image_token"]
        self._side = int(given["patch_size"]) * int(given["spatial_merge_size"])  # pixels of a token
        self._break, self._end = str(given["image_break_token"]), str(given["image_end_token"])

    def __call__(
        self,
        images: list[Image],
        text: list[str],
        *,
        return_tensors: str = "pt",
        return_text_replacement_offsets: bool = False,
        return_mm_token_type_ids: bool = False,
        add_special_tokens: bool = True,
    ) -> dict[str, Any]:
        found = self.image_processor(images, patch_size=self._side, return_tensors=return_tensors)
        if not return_text_replacement_offsets:
            return dict(found)
        texts = [{"replacement": self._text(size)} for size in found["image_sizes"]]
        return {**found, "text_replacement_offsets": [texts]}

    def _text(self, size: Any) -> str:
        rows, columns = (int(length) // self._side for length in size)
        return self._break.join([self.image_token * columns] * rows) + self._end
