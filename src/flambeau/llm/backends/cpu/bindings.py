"""The CPU kernels: compiled on first use; ctypes functions and structures of csrc/network.h and paged_attention.h."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from flambeau.llm.executor.background_compiler import cache_folder

log = logging.getLogger(__name__)
# No -ffast-math: linking with it would turn off denormal numbers for the whole process.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
BUILD_TIMEOUT_S = 600.0


class CPagedStep(ctypes.Structure):
    """Attention of one layer: `PagedStep`."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "keys", "values", "out")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_void_p) for name in ("positions", "slots", "starts", "tables")),
        *((name, c_int64) for name in ("num_tokens", "num_sequences", "heads", "kv_heads")),
        *((name, c_int64) for name in ("block_size", "table_width", "window")),
        ("scale", c_float),
        ("softcap", c_float),
    )


KINDS = ("plain", "float32", "bfloat16", "float16", "int8", "int4", "bfloat16_pairs")  # as in csrc/matrix.h
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu_squared")  # in the order of csrc/network.h


class CMatrix(ctypes.Structure):
    """The weights of a linear layer: `Matrix`."""

    _fields_ = (
        ("kind", c_int64),
        ("weights", c_void_p),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("size", "width", "group")),
    )


class CLayer(ctypes.Structure):
    """The weights and the cache of one layer: `Layer`."""

    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "cos", "sin")),
        *((name, CMatrix) for name in ("qkv", "out", "gate_up", "down")),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
    )


class CNetwork(ctypes.Structure):
    """A whole network: `Network`."""

    _fields_ = (
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_size", "rotary_size", "intermediate")),
        *((name, c_int64) for name in ("block_size", "num_layers")),
        *((name, c_int64) for name in ("activation", "has_gate", "cache_kind", "embedding_kind")),
        ("layers", POINTER(CLayer)),
        ("embedding", c_void_p),
        ("last_norm", c_void_p),
        ("head", CMatrix),
        *((name, c_float) for name in ("epsilon", "scale", "softcap")),
        *((name, c_float) for name in ("embedding_scale", "residual_scale", "logit_scale", "logit_softcap")),
    )


class CTokens(ctypes.Structure):
    """The tokens of one step: `Tokens`."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "positions", "slots", "starts", "tables")),
        *((name, c_int64) for name in ("num_tokens", "num_sequences", "table_width")),
        ("adapters", c_void_p),
        ("lora", c_void_p),
    )


class CLoraPart(ctypes.Structure):
    """What an adapter adds to some outputs of a layer: `LoraPart`."""

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        *((name, c_int64) for name in ("rank", "start", "count")),
    )


class CLoraLayer(ctypes.Structure):
    """What an adapter adds to a layer: `LoraLayer`."""

    _fields_ = (("parts", POINTER(CLoraPart)), ("num_parts", c_int64))


class KernelLibrary:
    """The library of this process; None until it is loaded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._was_tried = False
        self.library: ctypes.CDLL | None = None

    @property
    def instructions(self) -> str:
        """The instruction set that the loaded library uses for small integers."""
        assert self.library is not None
        name: bytes = self.library.flambeau_instructions()
        return name.decode()

    def load(self) -> bool:
        """Load it, after building it if needed (about 20 seconds); False and one warning if that fails."""
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
    library.flambeau_attend.argtypes = (POINTER(CPagedStep), c_int64, c_int64, c_int)
    library.flambeau_attend.restype = c_bool
    library.flambeau_multiply.argtypes = (POINTER(CMatrix), c_void_p, c_void_p, c_int64, c_int)
    library.flambeau_multiply.restype = None
    library.flambeau_instructions.restype = c_char_p
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


SOURCES = Path(__file__).parent / "csrc"


def find_compiler() -> str:
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    raise FileNotFoundError("no C++ compiler was found; install g++, or name one in CXX")


def built_library(folder: Path, compiler: str = "", flags: Sequence[str] = FLAGS) -> Path:
    """The library for this machine; built if it is not in the folder."""
    compiler = compiler or find_compiler()
    library = folder / f"operators-{cache_key(compiler, flags)}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{library.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # if several workers start at once, one builds and the others wait
        if not library.exists():
            build(library, compiler, flags)
    return library


def build(library: Path, compiler: str, flags: Sequence[str]) -> None:
    """Compile the sources; the library appears complete or not at all."""
    log.info("building the CPU kernels with %s: about 20 seconds, once for this machine", compiler)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / "operators.so"
        command = [compiler, *flags, str(SOURCES / "operators.cpp"), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        built.replace(library)


def cache_key(compiler: str, flags: Sequence[str]) -> str:
    """A hash of the sources, the compiler, its flags and the processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\n".join([*flags, version, processor_features()]).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def processor_features() -> str:
    """The instruction sets of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def first_error_line(error: BaseException) -> str:
    """A failure in one line; for a compiler, the first error it reports."""
    text = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line for line in (text or str(error)).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else repr(error))
