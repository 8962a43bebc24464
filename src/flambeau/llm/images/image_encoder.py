"""ImageEncoder: the files of images and videos → the embeddings that stand for them in a prompt, kept by content.

Shapes: N tokens of an image · X the decoder's hidden size
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from flambeau.llm.core.sequence import EncodedMedia
from flambeau.llm.errors import InvalidRequest, LLMError
from flambeau.llm.images.image_files import ImageFile, not_encoded
from flambeau.llm.images.image_processor import ImageProcessor, ResizedImage
from flambeau.llm.images.video_files import VideoFile
from flambeau.llm.images.video_processor import ReadVideo, VideoProcessor
from flambeau.llm.models.vision_architecture import PretrainedVision, VisionArchitecture
from flambeau.llm.transformers_package import first_lines

File = TypeVar("File")
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
        self._images: OrderedDict[bytes, EncodedMedia] = OrderedDict()
        self._lock = threading.Lock()  # images are encoded beside the steps

    def get(self, digest: bytes) -> EncodedMedia | None:
        with self._lock:
            if digest in self._images:
                self._images.move_to_end(digest)
            return self._images.get(digest)

    def put(self, image: EncodedMedia) -> None:
        with self._lock:
            if image.digest in self._images or image.features.nbytes > self._max_bytes:
                return
            self._images[image.digest] = image
            self.num_bytes += image.features.nbytes
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= self._images.popitem(last=False)[1].features.nbytes


def encode_missing(
    files: Sequence[tuple[bytes, File]],
    cache: FeatureCache,
    encode: Callable[[bytes, File], EncodedMedia | None],
    is_cancelled: Callable[[], bool],
) -> list[EncodedMedia]:
    """Embeddings of files by their digests: those that are kept, and those that are made now.

    Nothing is returned once it is cancelled; `encode` returns None then.
    """
    found = {digest: cache.get(digest) for digest, _ in files}
    for digest, file in files:
        if found[digest] is None:
            made = None if is_cancelled() else encode(digest, file)
            if made is None:
                return []
            found[digest] = made
            cache.put(made)
    return [known for digest, _ in files if (known := found[digest]) is not None]


class ImageEncoder:
    """Reads, resizes and encodes images and videos; embeddings are kept on the host."""

    def __init__(
        self,
        network: VisionEncoder,
        processor: ImageProcessor,
        *,
        cache_bytes: int,
        videos: VideoProcessor | None = None,
    ) -> None:
        self.arch = network.arch
        self.cache = FeatureCache(cache_bytes)
        self.processor = processor
        self.videos = videos  # None: it reads none
        self._network = network
        weight = next(network.parameters())
        self._device, self._dtype = weight.device, weight.dtype

    def encode(
        self, files: Sequence[ImageFile | VideoFile], is_cancelled: Callable[[], bool] = lambda: False
    ) -> list[EncodedMedia]:
        """Raises InvalidRequest, which names the file that cannot be read; before any is encoded."""
        named = [(self.digest(file), file) for file in files]
        missing = {digest: file for digest, file in named if self.cache.get(digest) is None}
        read = {digest: self._read(file, is_cancelled) for digest, file in missing.items()}

        def encode(digest: bytes, file: ImageFile | VideoFile) -> EncodedMedia | None:
            one = read.get(digest) or self._read(file, is_cancelled)  # its embeddings may have left the cache
            return self._encoded(digest, one, file, is_cancelled)

        return encode_missing(named, self.cache, encode, is_cancelled)

    def digest(self, file: ImageFile | VideoFile) -> bytes:
        """What tells the embeddings of a file from others: its content, and how frames of a video are chosen."""
        if isinstance(file, ImageFile):
            return hashlib.sha256(file.data).digest()
        parts = [b"video", self._video_processor(file).key.encode(), file.data, *file.frames]
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()

    def _video_processor(self, file: VideoFile) -> VideoProcessor:
        if self.videos is None:
            raise InvalidRequest(f"{file.name} is a video, and this model reads images and texts only", file.name)
        return self.videos

    def _read(self, file: ImageFile | VideoFile, is_cancelled: Callable[[], bool]) -> ResizedImage | ReadVideo:
        if isinstance(file, VideoFile):
            return self._video_processor(file).read(file, is_cancelled)
        return self.processor.read(file)

    def _encoded(
        self,
        digest: bytes,
        one: ResizedImage | ReadVideo,
        file: ImageFile | VideoFile,
        is_cancelled: Callable[[], bool],
    ) -> EncodedMedia | None:
        """None: it is cancelled."""
        if isinstance(one, ResizedImage):
            assert isinstance(file, ImageFile)
            return EncodedMedia(digest, self._encode(one, file), one.token_grid)
        features = []
        for pixels in one.pixels():
            if is_cancelled():
                return None
            features.append(self._encode_steps(pixels, one, file.name))
        check_length(one.num_tokens, sum(map(len, features)))
        return EncodedMedia(digest, torch.cat(features), one.token_grid, "video", one.times, one.num_places)

    @torch.inference_mode()
    def _encode_steps(self, pixels: Tensor, video: ReadVideo, name: str) -> Tensor:
        """Some steps of a video to [N, X], on the host."""
        with own_stream(self._device):
            try:
                return self._network.encode(pixels.to(self._device, self._dtype), video.grid, video.more).cpu()
            except (IndexError, RuntimeError, ValueError) as error:
                if not isinstance(self.arch, PretrainedVision) or isinstance(error, DEVICE_ERRORS):
                    raise
                raise InvalidRequest(
                    f"{name} is a video that the model cannot encode: {first_lines(error)}; send one of another size",
                    name,
                ) from error

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
        if image.num_tokens is not None:
            check_length(image.num_tokens, len(features))
        return features


def check_length(counted: int, encoded: int) -> None:
    """Raise for an image of another length than its text: those of several would be mixed up."""
    if counted != encoded:
        raise LLMError(
            f"an image has {counted} tokens by its processor and {encoded} by its encoder; the settings of the "
            "processor and config.json do not belong together: copy them again"
        )


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
