"""The CPU kernels as ctypes functions, and the structures of csrc/network.h and paged_attention.h."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import threading
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from flambeau.llm.backends.cpu.kernel_builds import KernelSource, built_library, find_kernels, first_error_line
from flambeau.llm.cache_folder import cache_folder

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
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("biases", c_void_p),
        ("num_places", c_int64),
        ("chunk", c_int64),
    )


KINDS = (  # as in csrc/matrix.h
    "plain",
    "float32",
    "bfloat16",
    "float16",
    "int8",
    "int4",
    "bfloat16_pairs",
    "int5",
    "int4_scaled",
    "int5_scaled",
    "int6_scaled",
    "int8_minimums",
    "fp8",
    "fp4",
    "fp4_wide",
    "codes",
)
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu_squared", "xielu")  # in the order of csrc/activations.h


class CMatrix(ctypes.Structure):
    """The weights of a linear layer: `Matrix`."""

    _fields_ = (
        ("kind", c_int64),
        ("weights", c_void_p),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("size", "width", "group")),
        ("next", c_void_p),
    )


class CNorm(ctypes.Structure):
    """The weights of a norm: `Norm`. Without a bias it is an RMS norm, else a layer norm."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class CExperts(ctypes.Structure):
    """The router and the experts of a layer: `Experts`."""

    _fields_ = (
        ("router", CMatrix),
        ("score_bias", c_void_p),
        ("gate_up", POINTER(CMatrix)),
        ("down", POINTER(CMatrix)),
        *((name, CMatrix) for name in ("shared_gate_up", "shared_down", "shared_gate")),
        *((name, c_int64) for name in ("count", "num_chosen", "router_kind", "normalizes", "activation")),
        *((name, c_float) for name in ("weight_scale", "limit", "alpha")),
        *((name, c_int64) for name in ("num_groups", "num_chosen_groups", "scales_inputs")),
        ("jitter", c_float),
        ("scales", c_void_p),
        *((name, CMatrix) for name in ("latent_in", "latent_out")),
        ("late_limit", c_float),
    )


RECURRENT_KINDS = (
    "short_conv",
    "mamba",
    "mamba2",
    "delta_net",
    "kimi_delta",
    "lightning",
    "gated",
    "rwkv",
    "channel_mix",  # the feed-forward layers of RWKV, which have a state, too
)  # in the order of csrc/recurrent.h


class CRecurrence(ctypes.Structure):
    """The weights and the states of a recurrent layer: `Recurrence`."""

    _fields_ = (
        *((name, c_int64) for name in ("kind", "channels", "width", "inner", "heads", "head_size", "state_size")),
        *((name, c_int64) for name in ("groups", "rank", "is_grouped", "norm_groups", "gates_first")),
        *((name, CMatrix) for name in ("in_", "out", "gate", "beta", "time", "parameters")),
        *((name, c_void_p) for name in ("conv_weight", "conv_bias", "time_bias", "decay", "skip")),
        *((name, CNorm) for name in ("norm", "time_norm", "b_norm", "c_norm")),
        ("part_scales", c_void_p),
        *((name, c_float) for name in ("epsilon", "time_low", "time_high", "max_beta", "input_scale", "output_scale")),
        *((name, c_void_p) for name in ("windows", "states")),
        *((name, CMatrix) for name in ("gate_up", "time_up")),
        *((name, c_float) for name in ("lowest_log_decay", "query_scale")),
        *((name, c_int64) for name in ("activates", "half")),
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, POINTER(CMatrix)) for name in ("input_gates", "decay_gates")),
        ("input_bias", c_void_p),
        ("activation", c_int64),
        ("begun", c_void_p),
        *((name, c_void_p) for name in ("key_share", "value_share", "receptance_share")),
        *((name, c_void_p) for name in ("denominators", "log_factors")),
    )


class CIndexer(ctypes.Structure):
    """What chooses the tokens that are attended to: `Indexer`."""

    _fields_ = (
        *((name, CMatrix) for name in ("query_up", "key", "weights")),
        ("key_norm", CNorm),
        ("keys", c_void_p),
        *((name, c_int64) for name in ("heads", "size", "num_chosen", "is_paired")),
        ("epsilon", c_float),
    )


class CLatentAttention(ctypes.Structure):
    """The weights of attention to latents: `LatentAttention`."""

    _fields_ = (
        *((name, CMatrix) for name in ("query_down", "query_up", "latent")),
        *((name, CNorm) for name in ("query_norm", "latent_norm")),
        *((name, POINTER(CMatrix)) for name in ("to_keys", "to_values")),
        *((name, c_int64) for name in ("latent_size", "rotary_size", "unrotated_size", "value_size", "is_paired")),
        ("epsilon", c_float),
        ("head_gate", CMatrix),
        ("indexer", POINTER(CIndexer)),
        ("num_chosen", c_int64),
    )


class CAltUp(ctypes.Structure):
    """What a layer does with several streams of hidden states: `AltUp`."""

    _fields_ = (
        *((name, CMatrix) for name in ("router", "prediction", "correction")),
        ("router_norm", CNorm),
        ("output_scale", c_void_p),
        *((name, CMatrix) for name in ("laurel_left", "laurel_right")),
        ("laurel_norm", CNorm),
    )


class CSharedBlock(ctypes.Structure):
    """A block that layers share, with what one of them changes: `SharedBlock`."""

    _fields_ = (
        *((name, CNorm) for name in ("input_norm", "mlp_norm")),
        *((name, CMatrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, CMatrix) for name in ("query_down", "query_up", "key_down", "key_up", "value_down", "value_up")),
        *((name, CMatrix) for name in ("gate_down", "gate_widen", "projection")),
    )


class CLayer(ctypes.Structure):
    """The weights and the cache of one layer: `Layer`."""

    _fields_ = (
        *((name, CNorm) for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm", "qk_norm")),
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, CMatrix) for name in ("qkv", "out", "gate_up", "down")),
        ("experts", POINTER(CExperts)),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
        ("sinks", c_void_p),
        ("recurrence", POINTER(CRecurrence)),
        ("latent", POINTER(CLatentAttention)),
        ("chunk", c_int64),
        ("query_scales", c_void_p),
        *((name, CNorm) for name in ("attention_sum_norm", "mlp_sum_norm")),
        *((name, c_float) for name in ("positive", "negative", "beta", "epsilon")),  # of xIELU
        *((name, c_int64) for name in ("heads", "kv_heads", "head_size", "rotary_size", "has_shared_keys")),
        ("value_norm", CNorm),
        *((name, CMatrix) for name in ("attention_gate", "input_gate", "input_projection")),
        ("input_norm", CNorm),
        *((name, c_float) for name in ("output_scale", "attention_scale")),
        *((name, CNorm) for name in ("dense_norm", "sparse_norm", "expert_norm", "router_norm")),
        *((name, c_float) for name in ("stream_attention", "stream_mlp")),
        *((name, CNorm) for name in ("attention_inner_norm", "mlp_inner_norm")),
        ("altup", POINTER(CAltUp)),
        ("cuts_gates", c_int64),
        *((name, c_float) for name in ("gate_threshold", "cos_factor", "sin_factor")),
        ("inverse", c_void_p),
        ("channel_mix", POINTER(CRecurrence)),
        ("block", POINTER(CSharedBlock)),
        ("mlp_limit", c_float),
    )


class CNetwork(ctypes.Structure):
    """A whole network: `Network`."""

    _fields_ = (
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_size", "rotary_size")),
        *((name, c_int64) for name in ("block_size", "num_layers", "intermediate", "max_experts")),
        *((name, c_int64) for name in ("activation", "has_gate", "cache_kind", "embedding_kind")),
        *((name, c_int64) for name in ("is_parallel", "wide_qk_norm", "late_qk_norm")),
        ("layers", POINTER(CLayer)),
        ("embedding", c_void_p),
        ("positions", c_void_p),
        ("embedding_norm", CNorm),
        ("last_norm", CNorm),
        ("head", CMatrix),
        *((name, c_float) for name in ("epsilon", "scale", "softcap")),
        ("biases", c_void_p),
        ("num_places", c_int64),
        ("clip", c_float),
        *((name, c_float) for name in ("embedding_scale", "residual_scale", "logit_scale", "logit_softcap")),
        ("recorded", c_void_p),
        ("num_recorded", c_int64),
        ("embedding_rows", CMatrix),
        ("gates_attention", c_int64),
        *((name, c_float) for name in ("attention_input_scale", "attention_output_scale")),
        *((name, c_float) for name in ("gate_scale", "mlp_output_scale")),
        *((name, CMatrix) for name in ("project_in", "project_out")),
        ("attention_gate", c_int64),
        ("own_embedding", c_void_p),
        *((name, c_int64) for name in ("own_kind", "own_size", "own_vocab")),
        ("own_projection", CMatrix),
        ("own_norm", CNorm),
        *((name, c_float) for name in ("own_scale", "own_projection_scale")),
        ("own_rows", CMatrix),
        *((name, c_int64) for name in ("num_streams", "active_stream")),
        *((name, POINTER(CMatrix)) for name in ("stream_projections", "stream_unembeddings")),
        ("head_layer", CMatrix),
        ("head_layer_norm", CNorm),
        ("head_activation", c_int64),
    )


class CTokens(ctypes.Structure):
    """The tokens of one step: `Tokens`."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "positions", "slots", "starts", "tables")),
        *((name, c_int64) for name in ("num_tokens", "num_sequences", "table_width")),
        ("adapters", c_void_p),
        ("lora", c_void_p),
        ("has_scales", c_int64),
        ("states", c_void_p),
        ("hidden", c_void_p),
        ("attention_input", c_void_p),
        ("state_slots", c_void_p),
        ("state_ends", c_void_p),
    )


class CLoraPart(ctypes.Structure):
    """What an adapter adds to some outputs of a layer: `LoraPart`."""

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        *((name, c_int64) for name in ("rank", "start", "count")),
        ("matrix", POINTER(CMatrix)),
    )


class CLoraLayer(ctypes.Structure):
    """What an adapter does to a layer: `LoraLayer`."""

    _fields_ = (("parts", POINTER(CLoraPart)), ("num_parts", c_int64), ("scale", c_void_p), ("shift", c_void_p))


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

    def can_load(self) -> bool:
        """Whether it is loaded, or can be, perhaps after it was built."""
        if self._was_tried:
            return self.library is not None
        return find_kernels(cache_folder() / "kernels").origin != "none"

    def load(self, *, builds: bool = True) -> bool:
        """Load it; False and one warning if that fails. Unless `builds`, False at once if it must be built first."""
        if not self._lock.acquire(blocking=builds):
            return False  # it is being built
        try:
            if not self._was_tried:
                source = find_kernels(cache_folder() / "kernels")
                if source.origin == "compiler" and not builds:
                    return False
                self._was_tried = True
                self.library = load_library(source)
        finally:
            self._lock.release()
        return self.library is not None


def load_library(source: KernelSource) -> ctypes.CDLL | None:
    """The library with its signatures declared; None and one warning if it cannot be built or loaded."""
    try:
        if source.path is None:
            raise OSError(source.reason)
        path = built_library(source.path.parent) if source.origin == "compiler" else source.path
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the CPU kernels are not available, plain PyTorch is used: %s", first_error_line(error))
        return None
    library.flambeau_attend.argtypes = (POINTER(CPagedStep), c_int64, c_int64, c_int)
    library.flambeau_attend.restype = None
    library.flambeau_multiply.argtypes = (POINTER(CMatrix), c_void_p, c_void_p, c_int64, c_int)
    library.flambeau_multiply.restype = None
    library.flambeau_quantize.argtypes = (c_void_p, *[c_int64] * 5, c_void_p, c_int)
    library.flambeau_quantize.restype = None
    library.flambeau_narrowest.argtypes = (c_void_p, c_int64, c_int)
    library.flambeau_narrowest.restype = c_int64
    library.flambeau_pack.argtypes = (c_void_p, *[c_int64] * 4, c_void_p, c_int)
    library.flambeau_pack.restype = None
    library.flambeau_pack_fp8.argtypes = (*[c_void_p] * 2, *[c_int64] * 4, c_void_p, c_int)
    library.flambeau_fits_fp4.argtypes = (c_void_p, c_int64, c_int)
    library.flambeau_fits_fp4.restype = c_bool
    library.flambeau_pack_fp8.restype = None
    library.flambeau_pack_codes.argtypes = (*[c_void_p] * 3, *[c_int64] * 4, c_void_p, c_int)
    library.flambeau_pack_codes.restype = None
    library.flambeau_pack_levels.argtypes = (*[c_void_p] * 3, *[c_int64] * 4, c_void_p, c_int)
    library.flambeau_pack_levels.restype = None
    library.flambeau_read_rows.argtypes = (POINTER(CMatrix), c_void_p, c_int64, c_void_p)
    library.flambeau_read_rows.restype = None
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
