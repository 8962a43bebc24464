"""The backend for a device: what computes the steps of a network with a cache."""

from __future__ import annotations

import logging

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.backends.cpu.attention import choose_attention
from flambeau.llm.backends.cpu.backend import CpuBackend
from flambeau.llm.backends.cuda.backend import CudaBackend
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.config import EngineConfig
from flambeau.llm.executor.backend import Backend
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.models.transformer import Transformer

logger = logging.getLogger(__name__)


def cpu_backend(
    model: Transformer,
    cache: KVCache,
    config: EngineConfig,
    name: str,
    adapters: AdapterStore | None,
    states: HiddenStates | None,
) -> Backend:
    return CpuBackend(model, cache, name=name, adapters=adapters, states=states)


def cuda_backend(
    model: Transformer,
    cache: KVCache,
    config: EngineConfig,
    name: str,
    adapters: AdapterStore | None,
    states: HiddenStates | None,
) -> Backend:
    return CudaBackend(
        model,
        cache,
        max_num_seqs=config.max_num_seqs,
        max_blocks=max_blocks(model, config),
        name=name,
        adapters=adapters,
        states=states,
    )


def max_blocks(model: Transformer, config: EngineConfig) -> int:
    """Blocks of the longest sequence; padding may go beyond its end."""
    length = min(config.max_model_len or model.arch.max_length, model.arch.max_length)
    return -(-(length + config.speculate_k) // config.block_size)


BACKENDS = {  # by type of device; others run as on a CPU without kernels: eagerly, then through Inductor
    "cpu": cpu_backend,
    "cuda": cuda_backend,
}


def eager_backend(
    model: Transformer, cache: KVCache, adapters: AdapterStore | None = None, states: HiddenStates | None = None
) -> Backend:
    """Plain PyTorch, with the attention kernel of the CPU if that is loaded."""
    return EagerBackend(model, cache, choose_attention, adapters=adapters, states=states)


def make_backend(
    model: Transformer,
    cache: KVCache,
    config: EngineConfig,
    name: str = "the model",
    adapters: AdapterStore | None = None,
    states: HiddenStates | None = None,
) -> Backend:
    """The backend for a device; `name` appears in its log lines."""
    kind = cache.keys[0].device.type
    # A graph would read as many entries as the longest sequence may have.
    is_plain = kind == "cuda" and model.arch.compression is not None
    if config.compile and is_plain:
        logger.info("%s: plain PyTorch computes it; attention to compressed entries is not compiled on a GPU", name)
    if not config.compile or is_plain:
        return eager_backend(model, cache, adapters, states)
    return BACKENDS.get(kind, cpu_backend)(model, cache, config, name, adapters, states)
