"""Loads the engine's own network: its weights, what is applied to them, its cache and its backend."""

from __future__ import annotations

import importlib
import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.adapters.lora_weights import AdapterTarget
from flambeau.llm.adapters.merge import MergeOnLoad, check_merge
from flambeau.llm.backends.cpu.network import has_integer_weights
from flambeau.llm.backends.cpu.packed_linear import quantized_for_kernels
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture, read_declared
from flambeau.llm.checkpoints.gguf_encoders import read_image_settings, report_encoder, warn_of_encoders
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.checkpoints.vision_weights import check_plain, has_sounds, has_vision, load_vision
from flambeau.llm.config import EngineConfig
from flambeau.llm.cpu_weights import (
    can_keep_blocks,
    can_keep_codes,
    can_keep_groups,
    has_whole_step,
    layer_makers,
    pack_last_layer,
    packer,
    packs_last_layer,
    packs_on_load,
    use_faster_layers,
)
from flambeau.llm.device_backends import eager_backend, make_backend
from flambeau.llm.errors import LLMError
from flambeau.llm.executor.backend import Backend
from flambeau.llm.executor.cache_sizes import SlotCounts, num_blocks_for, num_rings_for, num_slots_for, ring_length
from flambeau.llm.executor.draft import DraftModel
from flambeau.llm.executor.head import HeadModel
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.executor.shard import Shard, add_all_reduce, local_architecture
from flambeau.llm.executor.state_cache import StateCache, state_bytes
from flambeau.llm.executor.tensor_parallel import TensorParallelGroup, minimum_of_ranks, sum_over_ranks
from flambeau.llm.gguf_header import gguf_path
from flambeau.llm.gpu_weights import can_keep_integers, can_keep_on_gpu, join_equal_parts, order_codes
from flambeau.llm.images.image_encoder import FeatureCache, ImageEncoder
from flambeau.llm.images.pretrained_encoder import load_pretrained_encoder
from flambeau.llm.images.pretrained_processor import MissingPackage
from flambeau.llm.images.processors import read_processor, read_video_processor
from flambeau.llm.kv_store.block_store import BlockStore, open_store
from flambeau.llm.kv_store.rank_store import StoreFollower
from flambeau.llm.mapped_files import trim_heap
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.draft_heads import DraftHead
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.models.vision_architecture import PretrainedVision
from flambeau.llm.proposers import check_head, head_digest, load_draft, load_head, make_draft, make_head_model
from flambeau.llm.quantize.quantizer import build, quantize_on_load
from flambeau.llm.sounds.pretrained_sounds import load_pretrained_sounds
from flambeau.llm.sounds.sound_encoder import SoundClipEncoder
from flambeau.llm.sounds.sound_processor import has_extractor, read_sound_processor

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FP8_CAPABILITY = (8, 9)  # of GPUs that convert float8 by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedNetwork:
    """A network on its device with its cache, or one rank's part of both."""

    arch: Architecture  # of the whole network
    backend: Backend
    num_blocks: int
    state_cache: StateCache | None = None  # of recurrent layers
    adapters: AdapterStore | None = None  # None: a network of transformers
    store: BlockStore | StoreFollower | None = None
    draft: DraftModel | HeadModel | None = None  # on rank 0 only, and not sharded
    images: ImageEncoder | None = None  # on rank 0 only, and not sharded
    sounds: SoundClipEncoder | None = None  # likewise
    config: EngineConfig
    whole_prompts: bool = False  # the network cannot compute a prompt in chunks


def load_network(
    path: Path, config: EngineConfig, device: torch.device, ranks: TensorParallelGroup | None
) -> LoadedNetwork:
    """Load a checkpoint, or a rank's part of it. Everything that is applied to a network is applied here, in order."""
    forms = kept_forms(path, config, device, ranks)
    arch = read_architecture(path, forms)
    check_prefixes(config, arch)
    check_head(config, arch)
    dtype = dtype_for(config, arch, device)
    local = arch if ranks is None else local_architecture(arch, ranks.size)
    shard = None if ranks is None else Shard(arch, ranks.rank, ranks.size)
    target = AdapterTarget(arch=arch, local=local, shard=shard, device=device, dtype=dtype)
    if device.type == "cuda" and config.compile and ranks is None:
        threading.Thread(target=import_gpu_kernels, name="importing", daemon=True).start()
    # 1. A merged adapter, then quantization or the order of the CPU kernels, layer by layer while weights are read.
    model = load_weights(path, config, target, ranks, forms)
    # 2. Tensor parallelism.
    if shard is not None:
        add_all_reduce(model, shard)
    # 3. Faster versions of quantized layers.
    use_faster_layers(model, config, device, dtype, is_part=ranks is not None)
    # 4. What proposes tokens and the encoders of images and sounds, then the cache in the memory that is left.
    is_leader = ranks is None or ranks.rank == 0
    draft = load_draft(config, arch, device, dtype) if is_leader else None
    head = load_head(path, config, arch, model, device, dtype, ranks) if is_leader else None
    images = load_images(path, arch, config, device, dtype) if is_leader else None
    sounds = load_sounds(path, arch, config, device, dtype, images) if is_leader else None
    cached = cache_dtype(model, config, device, dtype)
    cache = make_cache(model, config, target, ranks, draft, head, cached)
    heading = make_head_model(head, model, cache, config, ranks) if head else None
    kind = f"{arch!r} {dtype} {config.quantization} {head_digest(head, config)}"
    store = open_store(config, cache, model, kind, ranks)
    # 5. The backend. Ranks run eagerly: while one compiles, the others would wait.
    adapters = AdapterStore(target, model)
    backend = (
        make_backend(model, cache, config, adapters=adapters, states=heading.states if heading else None)
        if ranks is None
        else eager_backend(model, cache, adapters, heading.states if heading else None)
    )
    num_rings = num_rings_for(draft.arch, config, device) if draft is not None else 0
    drafting = make_draft(draft, cache.num_blocks, config, device, cached, num_rings) if draft else heading
    return LoadedNetwork(
        arch=arch,
        backend=backend,
        num_blocks=cache.num_blocks,
        state_cache=cache.states,
        adapters=adapters,
        config=config,
        store=store,
        draft=drafting,
        images=images,
        sounds=sounds,
    )


def kept_forms(path: Path, config: EngineConfig, device: torch.device, ranks: TensorParallelGroup | None) -> KeptForms:
    """The forms of quantized weights that the network computes with."""
    declared = read_declared(path)
    on_gpu = can_keep_on_gpu(config, device, ranks, declared)
    for_gpu, for_cpu = can_keep_integers(config, device, ranks, declared), can_keep_groups(config, device, ranks)
    return KeptForms(
        blocks=on_gpu or can_keep_blocks(config, device, ranks),
        codes=on_gpu or can_keep_codes(config, device, ranks),
        groups="gpu" if for_gpu else "cpu" if for_cpu else None,
    )


def load_weights(
    path: Path, config: EngineConfig, target: AdapterTarget, ranks: TensorParallelGroup | None, forms: KeptForms
) -> Transformer:
    """The network with its weights, which are merged, quantized or packed layer by layer as they are read."""
    arch, local, device, dtype = target.arch, target.local, target.device, target.dtype
    is_part = ranks is not None
    makers = layer_makers(config, device, ranks)
    arrived = quantize_on_load(config.quantization, arch, makers)
    packs_head = packs_last_layer(config, device, ranks)
    keeps_types = makers.linear is quantized_for_kernels or (packs_head and arrived is not None)
    if arrived is None and packs_on_load(path, config, arch, device, ranks, dtype):
        arrived = packer(path, arch, dtype, is_part=is_part)
        # Narrow embeddings that no kernel multiplies would be widened in each step.
        keeps_types = packs_head or not arch.tied_embeddings or (ranks is None and has_whole_step(arch))
    if forms.groups == "gpu":
        arrived = order_codes(dtype, is_part=is_part)
    merge: MergeOnLoad | None = None
    if config.merge_lora:
        check_merge(config.lora_adapters)
        total = None if ranks is None else partial(sum_over_ranks, ranks=ranks)
        merge = arrived = MergeOnLoad(Path(*config.lora_adapters.values()), target, arrived, total)
    model = load_model(
        path,
        device=device,
        dtype=dtype,
        build=lambda _: build(local) if ranks is None else build(local, whole=arch),
        shard=target.shard,
        arrived=arrived,
        keeps_types=keeps_types and not config.merge_lora,
        quantization=config.quantization,
        forms=forms,
    )
    join_equal_parts(model)
    if packs_head and merge is None:
        pack_last_layer(model, dtype)
    if merge is not None:
        merge.finish(model)
    if arrived is not None and device.type == "cpu":
        trim_heap()  # of what was replaced last
    return model


def make_cache(
    model: Transformer,
    config: EngineConfig,
    target: AdapterTarget,
    ranks: TensorParallelGroup | None,
    draft: Transformer | None,
    head: DraftHead | None,
    cached: torch.dtype,
) -> KVCache:
    """Blocks and states in the memory that weights and what proposes tokens leave."""
    local, device = target.local, target.device
    proposing, weight_bytes = draft or head, size_bytes(model)
    slots = num_slots_for(local, config, device, weight_bytes=weight_bytes)
    slots = slots if ranks is None else SlotCounts(*(minimum_of_ranks(each, ranks) for each in slots))
    taken_bytes = sum(slots) * state_bytes(local)
    if draft is not None:
        taken_bytes += num_rings_for(draft.arch, config, device) * ring_length(config) * state_bytes(draft.arch)
    proposing_arch = None if proposing is None else proposing.arch
    num_blocks = num_blocks_for(
        local, config, device, cached, proposing_arch, weight_bytes=weight_bytes, taken_bytes=taken_bytes
    )
    num_blocks = num_blocks if ranks is None else minimum_of_ranks(num_blocks, ranks)
    return KVCache(
        local,
        num_blocks,
        config.block_size,
        device=device,
        dtype=cached,
        num_slots=slots.number,
        num_spare=slots.num_spare,
    )


def check_prefixes(config: EngineConfig, arch: Architecture) -> None:
    """A prefix of a network with recurrent layers is more than blocks: it needs the states at its end."""
    if arch.recurrence is not None and (config.kv_host_memory_mb or config.kv_disk_folder):
        raise LLMError(
            "kv_host_memory_mb and kv_disk_folder keep keys and values, and not the states of recurrent layers, which "
            "this model has; leave them out"
        )


def import_gpu_kernels() -> None:
    """Import what the backend needs, with Triton: that takes a second, and the weights are read meanwhile."""
    with suppress(ImportError):  # the backend tells
        importlib.import_module("flambeau.llm.backends.cuda.network")


CPU_CACHES = {**DTYPES, "int8": torch.int8}


def cache_dtype(model: Transformer, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The type of cached keys and values: the network's, but float16 on a CPU if weights have fewer bits than that."""
    named = config.kv_cache_dtype
    if named == "fp8":
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            raise LLMError(f"kv_cache_dtype: fp8 needs an NVIDIA GPU from Ada or Hopper on, not {device}; leave it out")
        return torch.float8_e4m3fn
    if named and device.type == "cpu":
        if named not in CPU_CACHES:
            raise LLMError(f"kv_cache_dtype on a CPU must be one of {', '.join(CPU_CACHES)} or left out, not {named!r}")
        return CPU_CACHES[named]
    if named:
        raise LLMError(f"kv_cache_dtype must be fp8 or left out on {device}, not {named!r}")
    is_narrow = device.type == "cpu" and dtype == torch.float32 and has_integer_weights(model)
    return torch.float16 if is_narrow else dtype


def size_bytes(model: Transformer) -> int:
    """The memory of the weights, quantized or not."""
    return sum(tensor.numel() * tensor.itemsize for tensor in (*model.parameters(), *model.buffers()))


def load_images(
    path: Path, arch: Architecture, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> ImageEncoder | None:
    """The encoder of images, in a model that has one."""
    gguf = gguf_path(path)
    if arch.vision is None and gguf is not None and config.read_images:
        warn_of_encoders(gguf)
    if arch.vision is None or not config.read_images:
        return None
    if not has_vision(path, arch):
        logger.warning("%s holds no weights of an encoder of images: the model reads text only", path)
        return None
    folder = path if path.is_dir() else path.parent
    try:
        given = None if gguf is None else read_image_settings(gguf)
        processor = read_processor(folder, arch.vision, given)  # first: it fails quickly
        videos = read_video_processor(folder, arch.vision) if gguf is None else None  # it says nothing of times
    except MissingPackage as error:
        logger.warning("%s: the model reads text only, and requests with images are refused: %s", path, error)
        return None
    if gguf is not None:
        report_encoder(gguf)
    if isinstance(arch.vision, PretrainedVision):
        check_plain(path, arch)
        encoder = load_pretrained_encoder(folder, arch.vision, arch.unused, device=device, dtype=dtype)
        return ImageEncoder(encoder, processor, cache_bytes=config.image_cache_bytes, videos=videos)
    network = load_vision(path, arch.vision, device=device, dtype=dtype)
    return ImageEncoder(network, processor, cache_bytes=config.image_cache_bytes, videos=videos)


def load_sounds(
    path: Path,
    arch: Architecture,
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    images: ImageEncoder | None,
) -> SoundClipEncoder | None:
    """The encoder of sounds, in a model that has one; it keeps embeddings where that of images does."""
    if arch.sounds is None or not config.read_sounds:
        return None
    if not has_sounds(path):
        logger.warning("%s holds no weights of an encoder of sounds: the model reads none", path)
        return None
    folder = path if path.is_dir() else path.parent
    if not has_extractor(folder):
        logger.warning(
            "%s has no settings of an extractor of sounds (preprocessor_config.json or processor_config.json): "
            "requests with sounds are refused; copy them from the model's source",
            path,
        )
        return None
    try:
        processor = read_sound_processor(folder, arch.sounds)  # first: it fails quickly
    except MissingPackage as error:
        logger.warning("%s: requests with sounds are refused: %s", path, error)
        return None
    check_plain(path, arch)
    network = load_pretrained_sounds(folder, arch.sounds, device=device, dtype=dtype)
    return SoundClipEncoder(
        network, processor, images.cache if images is not None else FeatureCache(config.image_cache_bytes)
    )


def dtype_for(config: EngineConfig, arch: Architecture, device: torch.device) -> torch.dtype:
    """The configured type, else float32 on a CPU and the checkpoint's own on a GPU."""
    name = config.dtype or ("float32" if device.type == "cpu" else arch.dtype)
    if name not in DTYPES:
        raise LLMError(f"dtype must be one of {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]
