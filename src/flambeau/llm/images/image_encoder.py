"""ImageEncoder: the files of images → the embeddings that stand for them in a prompt, kept by what the files hold.

Shapes: N tokens of an image · X the decoder's hidden size
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flambeau.llm.core.sequence import EncodedImage
from flambeau.llm.errors import LLMError
from flambeau.llm.images.image_files import ImageFile, not_encoded
from flambeau.llm.images.image_processor import ImageProcessor, ResizedImage
from flambeau.llm.models.vision_architecture import PretrainedVision, VisionArchitecture

DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)


class VisionEncoder(Protocol):
    """A network that encodes images, one at a time."""

    @property
    def arch(self) -> VisionArchitecture: ...

    def encode(self, pixels: Tensor, grid: tuple[int, int] | None, more: Mapping[str, Any]) -> Tensor:
        """[N, X], of an image with so many rows and columns of patches; `more` is for encoders of transformers."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...


class FeatureCache:
    """Encoded images, up to a number of bytes of their embeddings; the ones used longest ago leave first."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._images: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._lock = threading.Lock()  # images are encoded beside the steps

    def get(self, digest: bytes) -> EncodedImage | None:
        with self._lock:
            if digest in self._images:
                self._images.move_to_end(digest)
            return self._images.get(digest)

    def put(self, image: EncodedImage) -> None:
        with self._lock:
            if image.digest in self._images or image.features.nbytes > self._max_bytes:
                return
            self._images[image.digest] = image
            self.num_bytes += image.features.nbytes
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= self._images.popitem(last=False)[1].features.nbytes


class ImageEncoder:
    """Reads, resizes and encodes images; embeddings are kept on the host."""

    def __init__(self, network: VisionEncoder, processor: ImageProcessor, *, cache_bytes: int) -> None:
        self.arch = network.arch
        self.cache = FeatureCache(cache_bytes)
        self.processor = processor
        self._network = network
        weight = next(network.parameters())
        self._device, self._dtype = weight.device, weight.dtype

    def encode(
        self, files: Sequence[ImageFile], is_cancelled: Callable[[], bool] = lambda: False
    ) -> list[EncodedImage]:
        """Raises InvalidRequest, which names the file that cannot be read; before any is encoded."""
        digests = [hashlib.sha256(file.data).digest() for file in files]
        found = {digest: self.cache.get(digest) for digest in digests}
        missing = {digest: file for digest, file in zip(digests, files, strict=True) if found[digest] is None}
        read = {digest: self.processor.read(file) for digest, file in missing.items()}
        for digest, resized in read.items():
            if is_cancelled():
                return []
            image = found[digest] = EncodedImage(digest, self._encode(resized, missing[digest]), resized.token_grid)
            self.cache.put(image)
        return [known for digest in digests if (known := found[digest]) is not None]

    @torch.inference_mode()
    def _encode(self, image: ResizedImage, file: ImageFile) -> Tensor:
        """[N, X], on the host."""
        with own_stream(self._device):
            pixels = image.pixels().to(self._device, self._dtype)
            try:
                features = self._network.encode(pixels, image.grid, image.more).cpu()
            except (IndexError, RuntimeError, ValueError) as error:
                if not isinstance(self.arch, PretrainedVision) or isinstance(error, DEVICE_ERRORS):
                    raise
                # Some encoders of transformers fail for images of a few pixels.
                raise not_encoded(file, error) from error
        if image.num_tokens not in (None, len(features)):  # those of several images would be mixed up
            raise LLMError(
                f"an image has {image.num_tokens} tokens by its processor and {len(features)} by its encoder; the "
                "settings of the processor and config.json do not belong together: copy them again"
            )
        return features


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
