"""Attributions with Captum, which is imported by the first request for an explanation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from flambeau.errors import BadRequest, PredictionException

Result = TypeVar("Result")


def captum_attribution() -> Any:
    try:
        import captum.attr
    except ImportError as error:
        raise PredictionException(
            f"explanations need captum ({error}): pip install 'flambeau[explain]'", error_code=501
        ) from error
    return captum.attr


def integrated_gradients(forward: Callable[..., torch.Tensor]) -> Any:
    return captum_attribution().IntegratedGradients(forward)


def layer_integrated_gradients(model: Any, layer: Any) -> Any:
    return captum_attribution().LayerIntegratedGradients(model, layer)


def with_gradients(attribute: Callable[[], Result], target: int) -> Result:
    """Run an attribution with gradients enabled, also when the caller is in inference mode."""
    with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # captum and autograd warn about the given inputs
        try:
            return attribute()
        except IndexError as error:
            raise BadRequest(f"target {target} cannot be explained: {error}") from None


def recordable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that autograd accepts, even if it was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def attribute_to_words(
    model: Any, layer: torch.nn.EmbeddingBag, indices: torch.Tensor, reference: torch.Tensor, target: int
) -> torch.Tensor:
    """Attributions of each word's vector, 1 × words × size; attributions of the bag itself are those of its mean."""
    count = len(indices)

    def forward(vectors: torch.Tensor) -> torch.Tensor:
        flat = vectors.reshape(-1, vectors.shape[-1])
        offsets = torch.arange(0, len(flat), count, device=flat.device)
        places = torch.arange(len(flat), device=flat.device)
        bags = torch.nn.functional.embedding_bag(places, flat, offsets, mode=layer.mode)
        hook = layer.register_forward_hook(lambda *_: bags)
        try:
            scores: torch.Tensor = model(indices.repeat(len(vectors)), offsets)
        finally:
            hook.remove()
        return scores

    weights = layer.weight.detach()
    result: torch.Tensor = integrated_gradients(forward).attribute(
        weights[indices].unsqueeze(0), weights[reference].unsqueeze(0), target=target, internal_batch_size=1
    )
    return result
