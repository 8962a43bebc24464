"""Loads an engine: reads the checkpoint and tokenizer, applies what the configuration asks for, chooses the backend."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.adapters.lora_weights import AdapterTarget
from flambeau.llm.adapters.merge import MergeOnLoad, check_merge
from flambeau.llm.backends.cpu.network import (
    has_integer_weights,
)
from flambeau.llm.backends.cpu.packed_linear import quantized_for_kernels
from flambeau.llm.backends.hugging_face.backend_choice import check_settings, load_pretrained
from flambeau.llm.backends.hugging_face.pretrained import read_limits
from flambeau.llm.checkpoints.checkpoint import (
    load_model,
    read_architecture,
    read_declared,
    unsupported_reason,
)
from flambeau.llm.checkpoints.gguf_encoders import read_image_settings, warn_of_encoders
from flambeau.llm.checkpoints.vision_weights import check_plain, has_vision, load_vision
from flambeau.llm.checkpoints.weight_files import weight_paths
from flambeau.llm.config import EngineConfig, ModelImpl
from flambeau.llm.cpu_weights import (
    can_keep_blocks,
    can_keep_codes,
    can_keep_groups,
    has_whole_step,
    layer_maker,
    pack_last_layer,
    packer,
    packs_last_layer,
    packs_on_load,
    use_faster_layers,
)
from flambeau.llm.device_backends import eager_backend, make_backend
from flambeau.llm.engine import Adapters, Engine
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.executor.backend import Backend
from flambeau.llm.executor.draft import DraftModel
from flambeau.llm.executor.head import HeadModel
from flambeau.llm.executor.kv_cache import (
    KVCache,
    SlotCounts,
    block_bytes,
    num_blocks_for,
    num_rings_for,
    num_slots_for,
    ring_length,
)
from flambeau.llm.executor.parallel import (
    LeaderAdapters,
    LeaderBackend,
    LeaderStates,
    Shard,
    TensorParallelGroup,
    add_all_reduce,
    follow,
    local_architecture,
    minimum_of_ranks,
    sum_over_ranks,
)
from flambeau.llm.executor.state_cache import StateCache, state_bytes
from flambeau.llm.gguf_header import gguf_path
from flambeau.llm.gpu_weights import can_keep_integers, can_keep_on_gpu, join_equal_parts, order_codes
from flambeau.llm.images.image_encoder import ImageEncoder
from flambeau.llm.images.pretrained_encoder import load_pretrained_encoder
from flambeau.llm.images.pretrained_processor import MissingPackage
from flambeau.llm.images.processors import read_processor
from flambeau.llm.kv_store.block_store import BlockStore, open_store
from flambeau.llm.kv_store.rank_store import StoreFollower
from flambeau.llm.mapped_files import trim_heap
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.models.vision_architecture import PretrainedVision
from flambeau.llm.proposers import (
    check_head,
    head_digest,
    head_words,
    load_draft,
    load_head,
    make_draft,
    make_head_model,
    wants_head,
)
from flambeau.llm.quantize.quantizer import (
    build,
    quantize_on_load,
)
from flambeau.llm.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

MIN_VOCABULARY = 0.9  # of the network's ids
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
    config: EngineConfig
    whole_prompts: bool = False  # the network cannot compute a prompt in chunks


def load_engine(path: Path, config: EngineConfig | None = None, **options: Any) -> Engine:
    """The engine of a checkpoint; options are fields of EngineConfig. With several ranks, this runs on rank 0."""
    config = replace(config or EngineConfig(), **options)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; name the folder of a checkpoint")
    device = device_for(config)
    reason = reason_for_transformers(path, config)
    if reason is not None:
        check_settings(config)
    ranks = TensorParallelGroup.join(device) if config.tensor_parallel_size > 1 else None
    tokenizer = load_tokenizer(Path(config.tokenizer) if config.tokenizer else path)  # first: it fails quickly
    if reason is None:
        check_vocabulary(tokenizer, read_architecture(path), config.tokenizer)
        loaded = load_network(path, config, device, ranks)
    else:
        loaded = load_transformers(path, config, device, reason)
        check_vocabulary(tokenizer, loaded.arch, config.tokenizer)
    leader = LeaderBackend(loaded.backend, ranks) if ranks else None
    adapters: Adapters | None = loaded.adapters
    states = loaded.state_cache
    if leader is not None and ranks is not None and loaded.adapters is not None:
        adapters = LeaderAdapters(loaded.adapters, ranks, leader)
    if leader is not None and ranks is not None and states is not None:
        states = LeaderStates(states, ranks, leader)
    return Engine(
        loaded.arch,
        leader or loaded.backend,
        num_blocks=loaded.num_blocks,
        state_cache=states,
        config=loaded.config,
        device=str(device),
        tokenizer=tokenizer,
        draft=loaded.draft,
        adapters=adapters,
        images=loaded.images,
        whole_prompts=loaded.whole_prompts,
        store=loaded.store if isinstance(loaded.store, BlockStore) else None,
    )


def reason_for_transformers(path: Path, config: EngineConfig) -> str | None:
    """Why a checkpoint runs through transformers; None: it does not."""
    if config.model_impl not in get_args(ModelImpl):
        raise LLMError(f"model_impl must be one of {', '.join(get_args(ModelImpl))}, not {config.model_impl!r}")
    if config.model_impl == "transformers":
        if not (path / "config.json").is_file():
            raise CheckpointError(f"model_impl: transformers needs a folder with a config.json, which {path} is not")
        return "model_impl: transformers"
    return unsupported_reason(path) if config.model_impl == "auto" else None


def load_transformers(path: Path, config: EngineConfig, device: torch.device, reason: str) -> LoadedNetwork:
    """Load a network of transformers, for checkpoints that the engine's own network does not know."""
    if importlib.util.find_spec("transformers") is not None:
        unknown = reason.partition(";")[0]
        logger.info("%s; transformers, which may have it, is imported, and that takes some seconds", unknown)
    with named_reason(reason):
        weight_paths(path)  # before anything slow
        limits = read_limits(path, trusts_code=config.trust_remote_code)
    if wants_head(config):
        raise LLMError(
            f"{head_words(config)} reads hidden states of the engine's own network, and this model runs through "
            "transformers; use a draft model, or n-grams of the text (speculative: true, or --speculative lookup)"
        )
    dtype = dtype_for(config, limits, device)
    draft = load_draft(config, limits, device, dtype)
    if draft is not None and draft.arch.recurrence is not None:
        raise LLMError(
            f"the draft {config.draft} has recurrent layers, and this model runs through transformers; use a draft "
            "without, or n-grams of the text (speculative: true, or --speculative lookup)"
        )
    draft_bytes = block_bytes(draft.arch, config.block_size, dtype) if draft else 0
    with named_reason(reason):
        loaded = load_pretrained(
            path, limits, config, device=device, dtype=dtype, reason=reason, draft_block_bytes=draft_bytes
        )
    drafts = draft is not None and bool(loaded.config.draft)
    return LoadedNetwork(
        arch=loaded.arch,
        backend=loaded.backend,
        num_blocks=loaded.num_blocks,
        draft=make_draft(draft, loaded.num_blocks, config, device, dtype) if draft and drafts else None,
        config=loaded.config,
        whole_prompts=loaded.whole_prompts,
    )


@contextmanager
def named_reason(reason: str) -> Iterator[None]:
    """Say why the engine's own network was not used, where that of transformers cannot be loaded either."""
    try:
        yield
    except CheckpointError as error:
        first = reason.partition(";")[0]
        # An error that begins with the same name says it all.
        text = str(error) if str(error).split(" ", 1)[0] == first.split(" ", 1)[0] else f"{first}; {error}"
        raise CheckpointError(text) from error


def check_vocabulary(tokenizer: Tokenizer, arch: Architecture, named: str) -> None:
    """Reject the tokenizer of another model, whose ids would mean other text; `named` is the tokenizer's own path.

    A network may have more ids than its tokenizer: vocabularies are padded, usually by less than a tenth.
    """
    if tokenizer.num_base_tokens > arch.vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.num_base_tokens} tokens and the model {arch.vocab_size}: it is the "
            "tokenizer of another model; use the files that came with the checkpoint"
        )
    if named and tokenizer.vocab_size < arch.vocab_size * MIN_VOCABULARY:
        raise CheckpointError(
            f"the tokenizer {named} has {tokenizer.vocab_size} tokens and the model {arch.vocab_size}: it is the "
            "tokenizer of another model; use the files that came with the checkpoint"
        )


def check_prefixes(config: EngineConfig, arch: Architecture) -> None:
    """A prefix of a network with recurrent layers is more than blocks: it needs the states at its end."""
    if arch.recurrence is not None and (config.kv_host_memory_mb or config.kv_disk_folder):
        raise LLMError(
            "kv_host_memory_mb and kv_disk_folder keep keys and values, and not the states of recurrent layers, which "
            "this model has; leave them out"
        )


def load_follower(path: Path, config: EngineConfig | None = None, **options: Any) -> Callable[[], None]:
    """Load the part of a rank other than 0; the result computes what rank 0 computes until that ends."""
    config = replace(config or EngineConfig(), **options)
    device = device_for(config)
    ranks = TensorParallelGroup.join(device)
    with errors_only(logging.getLogger("flambeau.llm.checkpoints")):  # rank 0 reads the same files, and warns of them
        loaded = load_network(path, config, device, ranks)
    assert loaded.adapters is not None
    following = partial(follow, loaded.backend, ranks, device, loaded.adapters, states=loaded.state_cache)
    if not isinstance(loaded.store, StoreFollower):
        return following
    loaded.store.start()
    return partial(following, loaded.store.join)


@contextmanager
def errors_only(source: logging.Logger) -> Iterator[None]:
    """Leave out what this logger and those below it have to say but errors."""
    level = source.level
    source.setLevel(logging.ERROR)
    try:
        yield
    finally:
        source.setLevel(level)


def load_network(
    path: Path, config: EngineConfig, device: torch.device, ranks: TensorParallelGroup | None
) -> LoadedNetwork:
    """Load a checkpoint, or a rank's part of it. Everything that is applied to a network is applied here, in order."""
    declared = read_declared(path)
    on_gpu, narrow = (
        can_keep_on_gpu(config, device, ranks, declared),
        can_keep_integers(config, device, ranks, declared),
    )
    blocks, codes, groups = (
        on_gpu or can_keep_blocks(config, device, ranks),
        on_gpu or can_keep_codes(config, device, ranks),
        can_keep_groups(config, device, ranks),
    )
    arch = read_architecture(path, keeps_blocks=blocks, keeps_codes=codes, keeps_groups=groups, narrow_groups=narrow)
    check_prefixes(config, arch)
    check_head(config, arch)
    dtype = dtype_for(config, arch, device)
    local = arch if ranks is None else local_architecture(arch, ranks.size)
    shard = None if ranks is None else Shard(arch, ranks.rank, ranks.size)
    target = AdapterTarget(arch=arch, local=local, shard=shard, device=device, dtype=dtype)
    if device.type == "cuda" and config.compile and ranks is None:
        threading.Thread(target=import_gpu_kernels, name="importing", daemon=True).start()
    # 1. A merged adapter, then quantization or the order of the CPU kernels, layer by layer while weights are read.
    make_layer = layer_maker(config, device, ranks)
    arrived = quantize_on_load(config.quantization, arch, make_layer)
    packs_head = packs_last_layer(config, device, ranks)
    keeps_types = make_layer is quantized_for_kernels or (packs_head and arrived is not None)
    if arrived is None and packs_on_load(path, config, arch, device, ranks, dtype):
        arrived = packer(path, arch, dtype, is_part=ranks is not None)
        # Narrow embeddings that no kernel multiplies would be widened in each step.
        keeps_types = packs_head or not arch.tied_embeddings or (ranks is None and has_whole_step(arch))
    if on_gpu or narrow:
        arrived = order_codes(dtype, is_part=ranks is not None)
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
        shard=shard,
        arrived=arrived,
        keeps_types=keeps_types and not config.merge_lora,
        keeps_blocks=blocks,
        keeps_codes=codes,
        keeps_groups=groups,
        narrow_groups=narrow,
        quantization=config.quantization,
    )
    join_equal_parts(model)
    if packs_head and merge is None:
        pack_last_layer(model, dtype)
    if merge is not None:
        merge.finish(model)
    if arrived is not None and device.type == "cpu":
        trim_heap()  # of what was replaced last
    # 2. Tensor parallelism.
    if shard is not None:
        add_all_reduce(model, shard)
    # 3. Faster versions of quantized layers.
    use_faster_layers(model, config, device, dtype, is_part=ranks is not None)
    # 4. The draft model and the encoder of images, then the cache in the memory that is left.
    is_leader = ranks is None or ranks.rank == 0
    draft = load_draft(config, arch, device, dtype) if is_leader else None
    head = load_head(path, config, arch, model, device, dtype, ranks) if is_leader else None
    images = load_images(path, arch, config, device, dtype) if is_leader else None
    proposing, weight_bytes = draft or head, size_bytes(model)
    drafting = proposing.arch if proposing is not None else None
    cached = cache_dtype(model, config, device, dtype)
    slots = num_slots_for(local, config, device, weight_bytes=weight_bytes)
    slots = slots if ranks is None else SlotCounts(*(minimum_of_ranks(each, ranks) for each in slots))
    num_rings = num_rings_for(draft.arch, config, device) if draft is not None else 0
    taken_bytes = sum(slots) * state_bytes(local)
    if draft is not None:
        taken_bytes += num_rings * ring_length(config) * state_bytes(draft.arch)
    num_blocks = num_blocks_for(
        local, config, device, cached, drafting, weight_bytes=weight_bytes, taken_bytes=taken_bytes
    )
    num_blocks = num_blocks if ranks is None else minimum_of_ranks(num_blocks, ranks)
    cache = KVCache(
        *(local, num_blocks, config.block_size),
        device=device,
        dtype=cached,
        num_slots=slots.number,
        num_spare=slots.num_spare,
    )
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
    return LoadedNetwork(
        arch=arch,
        backend=backend,
        num_blocks=num_blocks,
        state_cache=cache.states,
        adapters=adapters,
        config=config,
        store=store,
        draft=make_draft(draft, num_blocks, config, device, cached, num_rings) if draft else heading,
        images=images,
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
    except MissingPackage as error:
        logger.warning("%s: the model reads text only, and requests with images are refused: %s", path, error)
        return None
    if isinstance(arch.vision, PretrainedVision):
        check_plain(path, arch)
        encoder = load_pretrained_encoder(folder, arch.vision, arch.unused, device=device, dtype=dtype)
        return ImageEncoder(encoder, processor, cache_bytes=config.image_cache_bytes)
    network = load_vision(path, arch.vision, device=device, dtype=dtype)
    return ImageEncoder(network, processor, cache_bytes=config.image_cache_bytes)


def device_for(config: EngineConfig) -> torch.device:
    """The configured device, else a GPU if there is one."""
    return torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def dtype_for(config: EngineConfig, arch: Architecture, device: torch.device) -> torch.dtype:
    """The configured type, else float32 on a CPU and the checkpoint's own on a GPU."""
    name = config.dtype or ("float32" if device.type == "cpu" else arch.dtype)
    if name not in DTYPES:
        raise LLMError(f"dtype must be one of {', '.join(DTYPES)}, not {name!r}")
    return DTYPES[name]
