"""ctypes bindings of the CPU kernels: functions, and the structures of csrc/network.h and csrc/paged_attention.h."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import threading
from ctypes import POINTER, c_bool, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from flambeau.llm.backends.cpu.build import built_library, first_error_line
from flambeau.llm.executor.background_compiler import cache_folder

log = logging.getLogger(__name__)


class CPagedStep(ctypes.Structure):
    """Attention of one layer: `PagedStep`."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "keys", "values", "out")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_void_p) for name in ("positions", "slots", "starts", "tables")),
        *((name, c_int64) for name in ("num_tokens", "num_sequences", "heads", "kv_heads")),
        *((name, c_int64) for name in ("block_size", "table_width", "window")),
        ("scale", c_float),
    )


class CMatrix(ctypes.Structure):
    """A weight, packed or plain: `Matrix`."""

    _fields_ = (("packed", c_void_p), ("plain", c_void_p), ("size", c_int64), ("width", c_int64))


class CLayer(ctypes.Structure):
    """The weights and the cache of one layer: `Layer`."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        *((name, CMatrix) for name in ("qkv", "out", "gate_up", "down")),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
    )


class CNetwork(ctypes.Structure):
    """A whole network: `Network`."""

    _fields_ = (
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_size", "intermediate")),
        *((name, c_int64) for name in ("block_size", "num_layers")),
        ("layers", POINTER(CLayer)),
        *((name, c_void_p) for name in ("embedding", "cos", "sin", "last_norm")),
        ("head", CMatrix),
        ("epsilon", c_float),
        ("scale", c_float),
    )


class CTokens(ctypes.Structure):
    """The tokens of one step: `Tokens`."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "positions", "slots", "starts", "tables")),
        *((name, c_int64) for name in ("num_tokens", "num_sequences", "table_width")),
    )


class KernelLibrary:
    """The library of this process; None until it is loaded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._was_tried = False
        self.library: ctypes.CDLL | None = None

    def load(self) -> bool:
        """Load it, after building it if needed (about ten seconds); False and one warning if that fails."""
        with self._lock:
            if not self._was_tried:
                self._was_tried = True
                self.library = load_library()
        return self.library is not None


def load_library() -> ctypes.CDLL | None:
    """The library with its signatures declared; None and one warning if it cannot be built or loaded."""
    try:
        library = ctypes.CDLL(str(built_library(cache_folder() / "kernels")))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the CPU kernels are not available, plain PyTorch is used: %s", first_error_line(error))
        return None
    for function in (library.flambeau_attend, library.flambeau_attend_bfloat16):
        function.argtypes, function.restype = (POINTER(CPagedStep), c_int64, c_int), c_bool
    library.flambeau_step.argtypes = (POINTER(CNetwork), POINTER(CTokens), c_void_p, c_int64, c_void_p, c_int)
    library.flambeau_argmax.argtypes = library.flambeau_step.argtypes
    library.flambeau_argmax_steps.argtypes = (
        POINTER(CNetwork),
        POINTER(CTokens),
        *[c_void_p] * 2,
        c_int64,
        c_void_p,
        c_int,
    )
    for function in (library.flambeau_step, library.flambeau_argmax, library.flambeau_argmax_steps):
        function.restype = None
    return library


def index_pointers(*tensors: Tensor) -> list[int]:
    """The addresses of contiguous int64 tensors."""
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.dtype != torch.int64:
            raise ValueError(f"indices must be contiguous and int64, not {tensor.dtype}")
    return [tensor.data_ptr() for tensor in tensors]


kernels = KernelLibrary()
