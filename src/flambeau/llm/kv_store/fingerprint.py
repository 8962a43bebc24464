"""What keys and values depend on besides the tokens: the weights, the adapter, the cache's layout and the engine."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from flambeau.llm.core.block_pool import KEY_BYTES
from flambeau.llm.executor.kv_cache import KVCache

MAX_THREADS = 8  # hashing releases the interpreter
SOURCE_FILES = ("*.py", "*.cpp", "*.h", "*.cu")
ADAPTER_FILES = ("*.json", "*.safetensors", "*.bin")


def fingerprint(cache: KVCache, model: nn.Module, description: str) -> bytes:
    """The key that comes before the first block; `description` has what else changes keys and values."""
    layout = [(tuple(tensor.shape[1:]), str(tensor.dtype), tensor.device.type) for tensor in cache.tensors]
    parts = [engine_version(), description, repr(layout), weights_digest(model).hex()]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=KEY_BYTES).digest()


def engine_version() -> str:
    """A digest of the engine's own source code, and the version of PyTorch."""
    found = hashlib.blake2b(torch.__version__.encode(), digest_size=KEY_BYTES)
    folder = Path(__file__).parent.parent
    for file in sorted(file for pattern in SOURCE_FILES for file in folder.rglob(pattern)):
        found.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def weights_digest(model: nn.Module) -> bytes:
    """A digest of all weights as they are loaded, so after quantization and merging."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        digests = [*threads.map(tensor_digest, tensors.values())]
    whole = hashlib.blake2b(digest_size=KEY_BYTES)
    for name, digest in zip(tensors, digests, strict=True):
        whole.update(name.encode() + b"\0" + digest)
    return whole.digest()


def tensor_digest(tensor: Tensor) -> bytes:
    found = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=KEY_BYTES)
    numbers = tensor.detach().cpu().contiguous().flatten()
    if len(numbers):
        found.update(numbers.view(torch.uint8).numpy().data)
    return found.digest()


def adapter_key(base: bytes, folder: Path) -> bytes:
    """The key that comes before the first block of a sequence with the adapter in this folder."""
    found = hashlib.blake2b(base, digest_size=KEY_BYTES)
    for file in sorted({file for pattern in ADAPTER_FILES for file in folder.glob(pattern)}):
        content = hashlib.blake2b(file.read_bytes(), digest_size=KEY_BYTES)
        found.update(file.name.encode() + b"\0" + content.digest())
    return found.digest()
