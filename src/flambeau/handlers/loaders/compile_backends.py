"""Names of torch.compile backends; torch is imported on use."""

from __future__ import annotations

from enum import Enum


class PT2Backend(str, Enum):  # noqa: UP042  (existing handlers print its members)
    """Backends that a `pt2` section may name."""

    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"
    NVFUSER = "nvfuser"
    AOT_NVFUSER = "aot_nvfuser"
    AOT_CUDAGRAPHS = "aot_cudagraphs"
    OFI = "ofi"
    FX2TRT = "fx2trt"
    ONNXRT = "onnxrt"
    IPEX = "ipex"
    TORCHXLA_TRACE_ONCE = "torchxla_trace_once"
    OPENVINO = "openvino"
    TENSORRT = "tensorrt"
    HPU_BACKEND = "hpu_backend"


def check_valid_pt2_backend(backend: str) -> bool:
    """Whether a name is in PT2Backend or among the backends that torch lists."""
    if backend in {known.value for known in PT2Backend}:
        return True
    import torch

    return backend in torch.compiler.list_backends()
