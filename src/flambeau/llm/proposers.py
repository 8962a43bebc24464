"""What proposes tokens beside a model: a draft model, or a head on its hidden states, with caches of their own."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch
from torch import nn

from flambeau.llm.backends.cpu.attention import choose_attention
from flambeau.llm.backends.cpu.bindings import kernels
from flambeau.llm.backends.cpu.head import CpuHead, can_compute_head
from flambeau.llm.backends.cpu.packed_linear import pack_layers
from flambeau.llm.backends.cuda.head_rounds import HeadGraphs
from flambeau.llm.checkpoints.assistant_weights import is_assistant, load_assistant, read_assistant
from flambeau.llm.checkpoints.block_weights import is_block_head, load_block_head, read_block_head
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture, read_declared
from flambeau.llm.checkpoints.eagle_weights import is_eagle, load_eagle, read_eagle
from flambeau.llm.checkpoints.layer_formats import NO_FORMS, KeptForms
from flambeau.llm.checkpoints.mtp_weights import DECLARED, find_mtp, load_mtp, mtp_files, other_layers, read_mtp
from flambeau.llm.config import EngineConfig
from flambeau.llm.cpu_weights import can_keep_blocks, can_keep_groups, layer_makers, use_faster_layers
from flambeau.llm.device_backends import make_backend, max_blocks
from flambeau.llm.errors import LLMError
from flambeau.llm.executor.cache_sizes import ring_length
from flambeau.llm.executor.draft import DraftModel, StateRings
from flambeau.llm.executor.head import HeadKernels, HeadModel, HeadRounds
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.executor.tensor_parallel import TensorParallelGroup
from flambeau.llm.gpu_weights import can_keep_integers, join_equal_parts, order_codes
from flambeau.llm.kv_store.fingerprint import weights_digest
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.draft_heads import DraftHead
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.quantizer import quantize_on_load

logger = logging.getLogger(__name__)


def load_draft(
    config: EngineConfig, target: Architecture, device: torch.device, dtype: torch.dtype
) -> Transformer | None:
    """The draft model, if one is configured and used."""
    if not config.draft or config.speculation == "lookup" or config.speculate_k < 1 or wants_head(config):
        return None
    path = Path(config.draft)
    forms = forms_of_draft(config, device, read_declared(path))
    vocab_size = read_architecture(path, forms).vocab_size
    if vocab_size != target.vocab_size:
        raise LLMError(
            f"the draft {path} has {vocab_size} tokens and the model {target.vocab_size}; a draft must have the "
            "vocabulary of the model whose tokens it proposes"
        )
    arrived = order_codes(dtype) if forms.groups == "gpu" else None
    draft = load_model(path, device=device, dtype=dtype, arrived=arrived, forms=forms)
    join_equal_parts(draft)
    use_faster_layers(draft, config, device, dtype)
    return draft


def forms_of_draft(config: EngineConfig, device: torch.device, arch: Architecture) -> KeptForms:
    """Integers in groups, where kernels multiply them."""
    if can_keep_groups(config, device, None):
        return KeptForms(groups="cpu")
    # A draft with states decodes in plain PyTorch, which would widen packed weights in each step.
    if arch.recurrence is None and can_keep_integers(config, device, None, arch):
        return KeptForms(groups="gpu")
    return NO_FORMS


def make_draft(
    model: Transformer,
    num_blocks: int,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    num_rings: int = 0,
) -> DraftModel:
    """A draft model with a cache that uses the target's blocks; `num_rings` for recurrent layers."""
    length = ring_length(config)
    cache = KVCache(model.arch, num_blocks, config.block_size, device=device, dtype=dtype, num_slots=num_rings * length)
    rings = StateRings(cache.states, length) if cache.states.has_layers else None
    return DraftModel(make_backend(model, cache, config, "the draft"), model.arch.max_length, rings)


# ---- heads ----


def wants_head(config: EngineConfig) -> bool:
    """Whether tokens are proposed by a head instead of a model."""
    if config.speculate_k < 1 or config.speculation == "lookup":
        return False
    if config.speculation == "mtp":
        return True
    kinds = (is_assistant, is_block_head, is_eagle)
    return bool(config.draft) and any(is_kind(Path(config.draft)) for is_kind in kinds)


def head_words(config: EngineConfig) -> str:
    if config.speculation == "mtp":
        return "speculative: mtp"
    path = Path(config.draft)
    kind = "drafter" if is_assistant(path) else "DFlash head" if is_block_head(path) else "EAGLE head"
    return f"the {kind} {path}"


def check_head(config: EngineConfig, arch: Architecture) -> None:
    """Raise for settings and models that a head does not work with."""
    if config.speculation == "mtp" and config.draft:
        raise LLMError(
            f"speculative: mtp uses the model's own layer, and there is a draft, {config.draft}, too; leave one of "
            "them out"
        )
    if config.tensor_parallel_size > 1 and wants_head(config) and config.draft and is_assistant(Path(config.draft)):
        raise LLMError(
            f"the drafter {config.draft} reads keys and values of all heads, which {config.tensor_parallel_size} ranks "
            "have in parts; use one device, a draft model, or n-grams of the text (speculative: true, or --speculative "
            "lookup)"
        )
    if arch.num_hidden_streams and wants_head(config):
        raise LLMError(
            f"{head_words(config)} reads one hidden state of a token, and this model has {arch.num_hidden_streams} "
            "streams of them; use a draft model, or n-grams of the text (speculative: true, or --speculative lookup)"
        )


def load_head(
    path: Path,
    config: EngineConfig,
    arch: Architecture,
    model: Transformer,
    device: torch.device,
    dtype: torch.dtype,
    ranks: TensorParallelGroup | None,
) -> DraftHead | None:
    """The head that is configured: the draft's folder, or a layer of the model's own checkpoint.

    Of several ranks, the first has the whole head: it reads hidden states, embeddings and a last layer that all have.
    """
    if not wants_head(config):
        tell_of_mtp(path, arch)
        return None
    if config.speculation == "mtp":
        settings, naming = read_mtp(path, read_declared(path))
        arrived = quantize_on_load(config.quantization, arch, layer_makers(config, device, None))
        forms = KeptForms(blocks=ranks is not None and can_keep_blocks(config, device, ranks))
        head = load_mtp(path, settings, naming, model, device=device, dtype=dtype, arrived=arrived, forms=forms)
    elif is_assistant(Path(config.draft)):
        settings = read_assistant(Path(config.draft), arch)
        head = load_assistant(Path(config.draft), settings, model, device=device, dtype=dtype)
    elif is_block_head(Path(config.draft)):
        settings = read_block_head(Path(config.draft), arch)
        head = load_block_head(Path(config.draft), settings, model, device=device, dtype=dtype)
    else:
        settings = read_eagle(Path(config.draft), arch)
        head = load_eagle(Path(config.draft), settings, model, device=device, dtype=dtype)
    use_faster_layers(head, config, device, dtype, is_part=ranks is not None)
    if device.type == "cpu" and config.compile and kernels.load(builds=False):
        pack_layers(head, (nn.Linear,))  # most weights need 16 bits
    return head


def tell_of_mtp(path: Path, arch: Architecture) -> None:
    """Say that a layer of the checkpoint is not used."""
    is_declared = arch.num_unused_layers or any(arch.source.get(key) for key in DECLARED)
    is_declared = is_declared or arch.recurrence is not None  # Qwen3-Next's config.json does not say so
    if not is_declared and not arch.num_hidden_streams:
        return
    files = mtp_files(path)
    if arch.num_hidden_streams:
        own = re.compile(rf"^(model\.mtp_|mtp\.|(model\.(language_model\.)?)?layers\.{arch.num_layers}\.)")
        if any(own.match(stored.name) for file in files for stored in file):
            logger.warning("%s has a layer of multi-token prediction, which is left out", path)
    elif find_mtp(files, arch) is not None:
        logger.info("%s has a layer of multi-token prediction, which is not loaded; speculative: mtp uses it", path)
    elif found := other_layers(files):
        logger.warning("%s has a layer of multi-token prediction of another form, which is left out: %s", path, found)


def make_head_model(
    head: DraftHead, model: Transformer, cache: KVCache, config: EngineConfig, ranks: TensorParallelGroup | None
) -> HeadModel:
    """A head with a cache in the target's blocks. Nothing is captured while other ranks wait for this one."""
    keys = cache.keys[0]
    states = HiddenStates(head.settings.layers)
    if head.settings.kind == "assistant":
        logger.info("the head (%s) runs as plain PyTorch", head.settings.kind)
        return HeadModel(head, cache, states, choose_attention)
    own = KVCache(head.arch, cache.num_blocks, config.block_size, device=keys.device, dtype=keys.dtype)
    cache.of_head = own
    rounds: HeadRounds | None = None
    by_kernels: HeadKernels | None = None
    is_block = head.settings.kind == "dflash"
    if not is_block and keys.device.type == "cuda" and torch.version.hip is None and config.compile and ranks is None:
        blocks = max_blocks(model, config)
        rounds = HeadGraphs(head, model, own, max_num_seqs=config.max_num_seqs, max_blocks=blocks)
    elif not is_block and config.compile and can_compute_head(head, own):
        by_kernels = CpuHead(head, own)
    else:
        logger.info("the head (%s) runs as plain PyTorch", head.settings.kind)
    return HeadModel(head, own, states, choose_attention, rounds, by_kernels)


def head_digest(head: DraftHead | None, config: EngineConfig) -> str:
    """What tells the content of blocks on disk from that with another head."""
    keeps_entries = head is not None and head.settings.kind != "assistant"
    return weights_digest(head).hex() if head is not None and keeps_entries and config.kv_disk_folder else ""
