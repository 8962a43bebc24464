"""HyperShape: how layers read and change several streams of hidden states (hyper-connections)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperShape:
    """Several streams of hidden states; a layer reads a sum of them, and adds to each what it gives (DeepSeek V4)."""

    num_streams: int
    epsilon: float  # of the weights of streams
    # Streams are mixed by a matrix whose rows and columns sum to one, found in so many rounds; 0: they are not (Hy 4).
    num_rounds: int = 0
    largest: float = 2.0  # what a layer gives is multiplied by up to this for a stream …
    offset: float = 0.0  # … and this is added to the factor
    rank: int = 0  # of the products that weigh each number of each stream (Qwen 4); 0: streams are weighed as a whole
    has_head: bool = True  # weights of the streams' sum after the last layer; False: it is their mean (GLM-5.3)
