"""The backends of torch.compile that a model may name."""

from __future__ import annotations

from enum import Enum


class PT2Backend(str, Enum):  # noqa: UP042  (its members print as TorchServe's did)
    """The backends that a `pt2` section may name."""

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
    """Whether a name is one of the known backends, or of those that torch itself lists."""
    if backend in {known.value for known in PT2Backend}:
        return True
    import torch  # not before somebody has to know

    return backend in torch.compiler.list_backends()
