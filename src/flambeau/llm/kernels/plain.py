"""Which parts of a network the kernels know."""

from __future__ import annotations

from torch import nn

from flambeau.llm.models.rope import Rotation
from flambeau.llm.models.transformer import MLP, Transformer


def is_plain(module: nn.Module, others: tuple[type[nn.Module], ...] = ()) -> bool:
    """Whether a part of a network is what the kernels compute; anything applied to it may have changed it.

    `others` are kinds of layers that some kernels know beside the plain ones.
    """
    known = type(module) in (nn.Linear, nn.Embedding, MLP, Rotation, nn.ModuleList) or isinstance(module, others)
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and (known or type(module).__module__ == Transformer.__module__)
