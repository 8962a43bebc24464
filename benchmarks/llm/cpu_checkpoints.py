"""Random checkpoints with the same weights for two programs: a Hugging Face folder and GGUF files.

    python cpu_checkpoints.py FOLDER SHAPE [FILES]
    python cpu_checkpoints.py FOLDER CHECKPOINT
    python cpu_checkpoints.py --dequantize FILE.gguf OTHER.gguf

FILES are some of float32,bfloat16 (folders) and f32,bf16,q8_0,q4_0 (GGUF files); the default is all. With the folder of
a Llama checkpoint instead of the name of a shape, only the GGUF files are made, with its weights. --dequantize writes a
file with the same weights as float32 numbers. The packages `gguf` and `numpy` are enough: it runs beside llama.cpp.
"""

import json
import struct
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SHAPES: dict[str, dict[str, Any]] = {
    "smollm-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "tinyllama-1.1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
CONTEXT, EPSILON, THETA = 2048, 1e-5, 10000.0
KINDS = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


Weights = Iterator[tuple[str, str, np.ndarray]]


def weights(shape: dict[str, Any]) -> Weights:
    """Name in a Hugging Face checkpoint, name in GGUF, and the numbers of each tensor; the same in every call."""
    draw = np.random.default_rng(0)
    hidden, width = shape["hidden_size"], shape["intermediate_size"]
    head = hidden // shape["num_attention_heads"]
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (shape["num_key_value_heads"] * head, hidden),
        "self_attn.v_proj": (shape["num_key_value_heads"] * head, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }

    def matrix(rows: int, columns: int) -> np.ndarray:
        return draw.standard_normal((rows, columns), dtype=np.float32) / np.float32(np.sqrt(columns))

    yield "model.embed_tokens.weight", "token_embd.weight", matrix(shape["vocab_size"], hidden)
    for layer in range(shape["num_hidden_layers"]):
        for name, theirs in GGUF_NAMES.items():
            numbers = matrix(*sizes[name]) if name in sizes else np.ones(hidden, dtype=np.float32)
            yield f"model.layers.{layer}.{name}.weight", f"blk.{layer}.{theirs}.weight", numbers
    yield "model.norm.weight", "output_norm.weight", np.ones(hidden, dtype=np.float32)
    if not shape["tie_word_embeddings"]:
        yield "lm_head.weight", "output.weight", matrix(shape["vocab_size"], hidden)


def stored_weights(folder: Path, shape: dict[str, Any]) -> Weights:
    """The same for the weights of a bfloat16 checkpoint in one file."""
    data = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    entries, start = json.loads(data[8 : 8 + size]), 8 + size
    for name, theirs, _ in weights(shape):
        begin, end = entries[name]["data_offsets"]
        assert entries[name]["dtype"] == "BF16"
        halves = np.frombuffer(data[start + begin : start + end], dtype=np.uint16)
        numbers = (halves.astype(np.uint32) << 16).view(np.float32).reshape(entries[name]["shape"])
        yield name, theirs, numbers


def rounded(numbers: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 numbers, as float32."""
    return gguf.quants.dequantize(gguf.quants.quantize(numbers, KINDS["bf16"]), KINDS["bf16"])


def write_safetensors(folder: Path, shape: dict[str, Any], *, is_bfloat16: bool) -> None:
    """A folder with config.json and model.safetensors."""
    folder.mkdir(parents=True)
    config = {
        **shape,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "torch_dtype": "bfloat16" if is_bfloat16 else "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    entries: dict[str, Any] = {}
    end, size = 0, 2 if is_bfloat16 else 4
    for name, _, numbers in weights(shape):
        begin, end = end, end + numbers.size * size
        dtype = "BF16" if is_bfloat16 else "F32"
        entries[name] = {"dtype": dtype, "shape": list(numbers.shape), "data_offsets": [begin, end]}
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 64)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for _, _, numbers in weights(shape):
            file.write(gguf.quants.quantize(numbers, KINDS["bf16"]).tobytes() if is_bfloat16 else numbers.tobytes())


def interleaved(numbers: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a projection in llama.cpp's order: the two coordinates of a rotation are neighbors."""
    halves = numbers.reshape(heads, 2, -1, numbers.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(numbers.shape)


def write_gguf(path: Path, shape: dict[str, Any], kind: str, tensors: Weights) -> None:
    """A GGUF file without a vocabulary. Embeddings and the last layer have 8 bits in the file of 4 bits."""
    writer = gguf.GGUFWriter(str(path), "llama")
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(shape["hidden_size"] // heads)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for _, name, numbers in tensors:
        if kind == "bf16":
            numbers = rounded(numbers)
        if numbers.ndim == 1:
            writer.add_tensor(name, numbers)
            continue
        if "attn_q" in name or "attn_k" in name:
            numbers = interleaved(numbers, heads if "attn_q" in name else kv_heads)
        is_outer = name.startswith(("token_embd", "output"))
        stored = KINDS["q8_0" if kind == "q4_0" and is_outer else kind]
        writer.add_tensor(name, gguf.quants.quantize(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(folder: Path, name: str, wanted: Collection[str] = ("float32", "bfloat16", *KINDS)) -> None:
    source = Path(name)
    is_stored = (source / "config.json").is_file()
    shape = json.loads((source / "config.json").read_text()) if is_stored else SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    for dtype in {"float32", "bfloat16"} & {*wanted}:
        if not is_stored and not (folder / dtype).exists():
            print(f"writing {folder / dtype}", file=sys.stderr, flush=True)
            write_safetensors(folder / dtype, shape, is_bfloat16=dtype == "bfloat16")
    for kind in KINDS.keys() & {*wanted}:
        if not (folder / f"{kind}.gguf").exists():
            tensors = stored_weights(source, shape) if is_stored else weights(shape)
            print(f"writing {folder / kind}.gguf", file=sys.stderr, flush=True)
            write_gguf(folder / f"{kind}.gguf", shape, kind, tensors)


def dequantize(path: Path, to: Path) -> None:
    """The same GGUF file with float32 weights."""
    if to.exists():
        return
    print(f"writing {to}", file=sys.stderr, flush=True)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(str(to), reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")):
            of_items = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], of_items)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if sys.argv[1] == "--dequantize":
        dequantize(Path(sys.argv[2]), Path(sys.argv[3]))
        sys.exit()
    main(Path(sys.argv[1]), sys.argv[2], *(names.split(",") for names in sys.argv[3:]))
