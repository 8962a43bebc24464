"""Names of torchvision's operators, which a CPU build of torch cannot load, for transformers, which imports it."""

import functools

import torch


@functools.cache
def stand_in_for_torchvision() -> None:
    """Declare them, once."""
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
