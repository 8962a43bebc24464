"""Pools token vectors to one vector per text, for NumPy arrays and torch tensors.

Shapes: B texts, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flambeau.errors import HandlerError

Mode = Literal["cls", "max", "mean", "mean_sqrt_len"]

MODES: Mapping[str, Mode] = {  # in the order in which several are joined
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
}
TINY = 1e-12


def read_modes(document: Mapping[str, Any]) -> tuple[Mode, ...]:
    """The modes that a pooling config enables; mean if it enables none."""
    wanted = [key for key, value in document.items() if key.startswith("pooling_mode_") and value is True]
    unknown = sorted(set(wanted) - MODES.keys())
    if unknown:
        raise HandlerError(f"the pooling config enables {', '.join(unknown)}; supported: {', '.join(MODES)}")
    if document.get("include_prompt", True) is False:
        raise HandlerError("the pooling config leaves prompts out of the mean (include_prompt), which is not supported")
    return tuple(mode for key, mode in MODES.items() if key in wanted) or ("mean",)


def pool(hidden_BTD: Any, mask_BT: Any, modes: Sequence[Mode]) -> list[Any]:
    """One result BD per mode; the mask is 1.0 for tokens and 0.0 for padding."""
    return [pool_one(hidden_BTD, mask_BT[:, :, None], mode) for mode in modes]


def pool_one(hidden_BTD: Any, mask_BT1: Any, mode: Mode) -> Any:
    if mode == "cls":
        return hidden_BTD[:, 0]
    if mode == "max":
        found = (hidden_BTD - (1.0 - mask_BT1) * 1e9).max(1)
        return getattr(found, "values", found)  # torch returns (values, indices), NumPy the values
    total, count = (hidden_BTD * mask_BT1).sum(1), mask_BT1.sum(1)
    return total / (count if mode == "mean" else count**0.5)


def normalize(vectors_BD: Any) -> Any:
    """Scale vectors to length one."""
    return vectors_BD / ((vectors_BD * vectors_BD).sum(1)[:, None] ** 0.5).clip(TINY)
