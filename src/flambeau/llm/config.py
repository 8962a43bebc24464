"""EngineConfig: device, limits, cache size and speculation of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Quantization = Literal["int8", "int4", "fp8"]
SpeculationKind = Literal["draft", "lookup", "mtp"]
ModelImpl = Literal["auto", "flambeau", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, fixed when it is loaded."""

    device: str = ""  # "cpu", "cuda", "cuda:1"; empty: a GPU if there is one
    tokenizer: str = ""  # a folder or file; empty: the checkpoint's folder
    dtype: str = ""  # "float32", "bfloat16", "float16"; empty: float32 on a CPU, the checkpoint's on a GPU
    max_num_seqs: int = 256  # sequences that run at a time
    max_model_len: int | None = None  # tokens of one sequence; None: the limit of the architecture
    max_step_tokens: int = 512  # tokens of one step: a longer prompt is computed in chunks
    block_size: int = 16  # tokens of one block of the KV cache
    num_blocks: int | None = None  # None: from the memory and, on a CPU, the size of the model
    kv_cache_fraction: float = 0.9  # of the free GPU memory
    kv_cache_bytes: int | None = None  # size of the cache; None: computed from the free memory
    # "fp8": twice as many tokens on a GPU; on a CPU that of `dtype`, or "int8"; empty: chosen by the loader
    kv_cache_dtype: str = ""
    prefix_cache: bool = True
    kv_host_memory_mb: int | None = None  # host memory for prefixes that leave the cache; None: none
    kv_disk_folder: str = ""  # where prefixes are kept beyond the end of the process; empty: nowhere
    kv_disk_mb: int | None = None  # the size of that folder; None: 10 GiB
    compile: bool = True
    tensor_parallel_size: int = 1  # processes that share the network, each with a device of its own
    quantization: Quantization | None = None  # applied on load
    draft: str = ""  # a folder with a smaller model of the same vocabulary, or with a head
    # None: "draft" if there is a draft; "mtp": the checkpoint's own layer of multi-token prediction
    speculation: SpeculationKind | None = None
    speculate_k: int = 5  # tokens proposed ahead
    lora_adapters: Mapping[str, str] = field(default_factory=dict)  # names of adapters → their folders
    read_images: bool = True  # False: the encoder of images is not loaded
    read_sounds: bool = True  # False: the encoder of sounds is not loaded
    image_cache_bytes: int = 256 << 20  # of the embeddings of images and sounds that were read before
    model_impl: ModelImpl = "auto"  # whose network; "auto": transformers' where the engine's own does not fit
    trust_remote_code: bool = False  # run Python code in the checkpoint's folder, with transformers' networks
    merge_lora: bool = False  # add the one adapter to the weights while they are loaded
