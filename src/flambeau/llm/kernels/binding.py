"""The CPU kernels' library: its functions and the structures of cpu/network.h and cpu/paged_attention.h, in ctypes."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import threading
from ctypes import POINTER, c_bool, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from flambeau.llm.kernels import building

log = logging.getLogger(__name__)


class PagedStep(ctypes.Structure):
    """Attention of one layer."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "keys", "values", "out")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_void_p) for name in ("positions", "slots", "starts", "tables")),
        *((name, c_int64) for name in ("num_tokens", "num_sequences", "heads", "kv_heads")),
        *((name, c_int64) for name in ("block_size", "table_width", "window")),
        ("scale", c_float),
    )


class Matrix(ctypes.Structure):
    """A weight, packed or as it is."""

    _fields_ = (("packed", c_void_p), ("plain", c_void_p), ("size", c_int64), ("width", c_int64))


class Layer(ctypes.Structure):
    """The weights and the cache of one layer."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
    )


class Network(ctypes.Structure):
    """A whole network."""

    _fields_ = (
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_size", "intermediate")),
        *((name, c_int64) for name in ("block_size", "num_layers")),
        ("layers", POINTER(Layer)),
        *((name, c_void_p) for name in ("embedding", "cos", "sin", "last_norm")),
        ("head", Matrix),
        ("epsilon", c_float),
        ("scale", c_float),
    )


class Tokens(ctypes.Structure):
    """The tokens of one step."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "positions", "slots", "starts", "tables")),
        *((name, c_int64) for name in ("num_tokens", "num_sequences", "table_width")),
    )


class Kernels:
    """The library: there once somebody has loaded it in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._was_tried = False
        self.library: ctypes.CDLL | None = None

    def load(self) -> bool:
        """Build it if need be, which takes some ten seconds, and load it; False and a warning where that fails."""
        with self._lock:
            if not self._was_tried:
                self._was_tried = True
                self.library = load_library()
        return self.library is not None


def load_library() -> ctypes.CDLL | None:
    """The library of this machine; None and one line of log where there is none."""
    try:
        library = ctypes.CDLL(str(building.built_library(building.cache_folder() / "kernels")))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("plain PyTorch is used in place of the CPU kernels: %s", building.reason(error))
        return None
    for function in (library.flambeau_attend, library.flambeau_attend_bfloat16):
        function.argtypes, function.restype = (POINTER(PagedStep), c_int64, c_int), c_bool
    library.flambeau_step.argtypes = (POINTER(Network), POINTER(Tokens), c_void_p, c_int64, c_void_p, c_int)
    library.flambeau_choose.argtypes = library.flambeau_step.argtypes
    library.flambeau_go_ahead.argtypes = (POINTER(Network), POINTER(Tokens), *[c_void_p] * 2, c_int64, c_void_p, c_int)
    for function in (library.flambeau_step, library.flambeau_choose, library.flambeau_go_ahead):
        function.restype = None
    return library


def indices(*tensors: Tensor) -> list[int]:
    """Where these int64 tensors lie."""
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.dtype != torch.int64:
            raise ValueError(f"indices must be contiguous and int64, not {tensor.dtype}")
    return [tensor.data_ptr() for tensor in tensors]


kernels = Kernels()
