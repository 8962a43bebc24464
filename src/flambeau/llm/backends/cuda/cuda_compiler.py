"""compile_kernel: CUDA C++ to a function of the driver, by the NVRTC that PyTorch brings; no CUDA toolkit is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

LOCK = threading.Lock()


def compile_kernel(source: str, name: str, *, capability: str = "90", shared_bytes: int = 0) -> Any:
    """The function `name` of a text on the current device, for blocks with so many bytes of shared memory.

    Raises whatever is wrong: with the text, NVRTC, the driver or the device.
    """
    compile_text: Any = torch.cuda._compile_kernel
    with without_toolkit():
        kernel = compile_text(source, name, compute_capability=capability, nvcc_options=["-std=c++17"])
    if shared_bytes:
        kernel.set_shared_memory_config(shared_bytes)
    return kernel.func


@contextmanager
def without_toolkit() -> Iterator[None]:
    """Let PyTorch compile where there is no CUDA toolkit.

    It raises an error there, as it has no folder of the toolkit's headers to give to NVRTC. Our texts include none.
    """
    from torch.utils import cpp_extension  # takes a while, and is needed for nothing else

    with LOCK:
        found = cpp_extension.CUDA_HOME
        if found is None:
            cpp_extension.CUDA_HOME = str(Path(torch.__file__).parent)
        try:
            yield
        finally:
            cpp_extension.CUDA_HOME = found
