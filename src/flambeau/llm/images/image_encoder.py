"""ImageEncoder: the files of images → the embeddings that stand for them in a prompt, kept by what the files hold.

Shapes: N tokens of an image · X the decoder's hidden size
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from flambeau.llm.core.sequence import EncodedImage
from flambeau.llm.images.image_processor import ImageFile, ImageProcessor
from flambeau.llm.models.vision import VisionEncoder


class FeatureCache:
    """Embeddings of images, up to a number of bytes; the ones used longest ago leave first."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lock = threading.Lock()  # images are encoded beside the steps

    def get(self, digest: bytes) -> Tensor | None:
        with self._lock:
            if digest in self._features:
                self._features.move_to_end(digest)
            return self._features.get(digest)

    def put(self, digest: bytes, features: Tensor) -> None:
        with self._lock:
            if digest in self._features or features.nbytes > self._max_bytes:
                return
            self._features[digest] = features
            self.num_bytes += features.nbytes
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= self._features.popitem(last=False)[1].nbytes


class ImageEncoder:
    """Reads, resizes and encodes images; embeddings are kept on the host."""

    def __init__(self, network: VisionEncoder, processor: ImageProcessor, *, cache_bytes: int) -> None:
        self.arch = network.arch
        self.cache = FeatureCache(cache_bytes)
        self._network, self._processor = network, processor
        weight = network.vision_tower.embeddings.position_embedding.weight
        self._device, self._dtype = weight.device, weight.dtype

    def encode(
        self, files: Sequence[ImageFile], is_cancelled: Callable[[], bool] = lambda: False
    ) -> list[EncodedImage]:
        """Raises InvalidRequest, which names the file that cannot be read; before any is encoded."""
        digests = [hashlib.sha256(file.data).digest() for file in files]
        found = {digest: self.cache.get(digest) for digest in digests}
        missing = {digest: file for digest, file in zip(digests, files, strict=True) if found[digest] is None}
        pixels = {digest: self._processor.pixels(file) for digest, file in missing.items()}
        for digest, pixels_3SS in pixels.items():
            if is_cancelled():
                return []
            features = found[digest] = self._encode(pixels_3SS)
            self.cache.put(digest, features)
        return [EncodedImage(digest, found[digest]) for digest in digests]

    @torch.inference_mode()
    def _encode(self, pixels_3SS: Tensor) -> Tensor:
        """[N, X], on the host."""
        with own_stream(self._device):
            features_1NX = self._network(pixels_3SS.unsqueeze(0).to(self._device, self._dtype))
            return features_1NX[0].cpu()  # type: ignore[no-any-return]


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU: a stream of its own, so that steps and images do not wait for each other."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
        stream.synchronize()
