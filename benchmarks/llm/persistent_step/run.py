"""Checks and times a persistent decode kernel beside the engine's CUDA network: a trial for one sequence.

    python benchmarks/llm/persistent_step/run.py [--preset Llama-2-7B] [--length 200]

`step.cu` is compiled by NVRTC for the network's shapes. Both compute the same step from the same weights and KV cache.
Printed are the times of graph replays, the limit that memory bandwidth sets, and the relative difference of the logits.
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import gpu  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from flambeau.llm.backends.cuda.network import CudaNetwork  # noqa: E402
from flambeau.llm.executor.inputs import StepInputs  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache  # noqa: E402
from flambeau.llm.models.presets import preset  # noqa: E402
from flambeau.llm.models.transformer import Transformer  # noqa: E402
from flambeau.llm.quantize.packed_layers import pack  # noqa: E402
from flambeau.llm.quantize.quantizer import quantize  # noqa: E402

WEIGHT_TYPES = {None: 0, "int8": 1, "fp8": 2, "int4": 3}
PADDING = {0: 16, 1: 64, 2: 64, 3: 32}  # bytes between the rows of a stage, against bank conflicts
SHARED_LIMIT = 227 * 1024
NUM_THREADS = 12 * 32
NUM_BLOCKS = 132  # multiprocessors of an H200
ROW_BYTES = 2048  # a bulk copy takes about 40 ns, whatever its size
BLOCK_SIZE = 16


class PersistentStep:
    """The kernel for one network, with its buffers."""

    def __init__(self, model: Transformer, cache: KVCache, kind: str | None, inputs: StepInputs) -> None:
        arch, device, weight_type = model.arch, cache.keys[0].device, WEIGHT_TYPES[kind]
        widest = max(arch.intermediate_size, arch.hidden_size, arch.num_heads * arch.head_size)
        queries = arch.num_heads // arch.num_kv_heads
        x_bytes = -(-max(widest * 2, 11 * queries * (arch.head_size + 2) * 4) // 128) * 128
        stage = 16 * (ROW_BYTES + PADDING[weight_type]) + (ROW_BYTES * 2 if weight_type == 3 else 0)
        other = 512 + 2 * 11 * 16 * 4 + (widest // 64 + 8) * 8 + 512
        stages = (SHARED_LIMIT - x_bytes - other) // (stage + 20)
        self._shared_bytes = stages * (stage + 20) + x_bytes + other
        shapes = {
            "WT": weight_type, "HEAD_WT": 0, "HID": arch.hidden_size, "NH": arch.num_heads, "NKV": arch.num_kv_heads,
            "HD": arch.head_size, "FF": arch.intermediate_size, "LAYERS": arch.num_layers, "VOCAB": arch.vocab_size,
            "GROUP": 64, "RB": ROW_BYTES, "STAGES": stages, "NB": NUM_BLOCKS, "KVBLOCK": cache.block_size,
            "EPS": f"{arch.norm_epsilon}f", "XBYTES": x_bytes,
        }  # fmt: skip
        source = "".join(f"#define {name} {value}\n" for name, value in shapes.items()) + (HERE / "step.cu").read_text()
        compile_kernel = torch.cuda._compile_kernel  # type: ignore[attr-defined]
        self._kernel = compile_kernel(source, "step", compute_capability="90", nvcc_options=["-std=c++17"])
        self._kernel.set_shared_memory_config(self._shared_bytes)
        self._kept: list[Tensor] = []
        self._inputs, self._embedding = inputs, model.model.embed_tokens.weight

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        splits = NUM_BLOCKS // arch.num_kv_heads
        self._hidden, self.logits = zeros(arch.hidden_size, torch.bfloat16), zeros(arch.vocab_size, torch.float32)
        self._counters = zeros(4 * arch.num_layers + 8, torch.int32)
        norms = [gain for layer in model.model.layers for gain in gains(layer)]
        linears = [(*named, kind) for layer in model.model.layers for named in linear_layers(layer)]
        head = model.model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
        pointers = [
            self._addresses([linear.weight for linear, _, _ in linears] + [head]),
            self._addresses([packed_scales(*linear) for linear in linears] + [None]),
            self._addresses([*norms, model.model.norm.weight]),
            self._addresses([*cache.keys]),
            self._addresses([*cache.values]),
            model.rotation.cos,
            model.rotation.sin,
            self._hidden,
            zeros((arch.num_heads + 2 * arch.num_kv_heads) * arch.head_size, torch.bfloat16),
            zeros(arch.intermediate_size, torch.bfloat16),
            zeros(splits * arch.num_heads * arch.head_size, torch.float32),
            zeros(splits * arch.num_heads * 2, torch.float32),
            self.logits,
            inputs.positions_T,
            inputs.slots_T,
            inputs.context_lens_S,
            inputs.block_tables_SB,
            self._counters,
        ]
        self._parameters = self._addresses(pointers)

    def _addresses(self, tensors: list[Tensor | None]) -> Tensor:
        """A tensor of the tensors' addresses; it keeps them alive."""
        self._kept += [tensor for tensor in tensors if tensor is not None]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._kept.append(torch.tensor(addresses, dtype=torch.int64, device="cuda"))
        return self._kept[-1]

    def run(self) -> Tensor:
        self._counters.zero_()
        self._hidden.copy_(F.embedding(self._inputs.ids_T, self._embedding)[0])
        grid, block = (NUM_BLOCKS, 1, 1), (NUM_THREADS, 1, 1)
        self._kernel(grid=grid, block=block, args=[self._parameters], shared_mem=self._shared_bytes)
        return self.logits


def linear_layers(layer: nn.Module) -> list[tuple[nn.Module, bool]]:
    """The linear layers in the order of a step, and whether half of the outputs are gates."""
    attention, mlp = layer.self_attn, layer.mlp
    return [(attention.qkv_proj, False), (attention.o_proj, False), (mlp.gate_up_proj, True), (mlp.down_proj, False)]


def gains(layer: nn.Module) -> tuple[Tensor, Tensor]:
    return layer.input_layernorm.weight, layer.post_attention_layernorm.weight


def packed_scales(linear: nn.Module, is_gated: bool, kind: str | None) -> Tensor | None:
    """Scales of rows; for int4, scale and minimum of each group in the order of the kernel's tiles of 16 rows."""
    if kind is None:
        return None
    if kind != "int4":
        return linear.scale.flatten().float().contiguous()
    both = torch.stack((linear.scales, linear.minimums), -1)
    rows, groups, _ = both.shape
    if is_gated:
        return both.view(2, rows // 16, 8, groups, 2).permute(1, 3, 0, 2, 4).contiguous()
    return both.view(rows // 16, 16, groups, 2).permute(0, 2, 1, 3).contiguous()


def inputs_of(length: int) -> StepInputs:
    """A step of one sequence of this length, whose blocks lie anywhere."""
    table = torch.randperm(-(-length // BLOCK_SIZE) + 1, device="cuda").view(1, -1) + 1
    slot = table[0, (length - 1) // BLOCK_SIZE] * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
    one, starts = torch.tensor([length], device="cuda"), torch.tensor([0, 1], device="cuda")
    return StepInputs(torch.tensor([17], device="cuda"), one - 1, slot.view(1), starts, one, table, query_len=1)


def replay_ms(run: object) -> float:
    """The median time of a captured step."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(30):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 30)
    return sorted(times)[2]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="Llama-2-7B", help="default: %(default)s")
    parser.add_argument("--length", type=int, default=200, help="tokens in the KV cache (default %(default)s)")
    asked = parser.parse_args()
    arch, read = preset(asked.preset), gpu.bandwidth("cuda")
    for kind in WEIGHT_TYPES:
        model = gpu.random_network(arch, "cuda", torch.bfloat16)
        if kind:
            quantize(model, kind)
            pack(model, torch.bfloat16)
        inputs = inputs_of(asked.length)
        cache = KVCache(arch, int(inputs.block_tables_SB.max()) + 2, BLOCK_SIZE, device="cuda", dtype=torch.bfloat16)
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_()
        network, step = CudaNetwork(model, cache), PersistentStep(model, cache, kind, inputs)
        expected, found = network.run(inputs).flatten().clone(), step.run().clone()
        difference = ((found - expected).norm() / expected.norm()).item()
        times = replay_ms(step.run), replay_ms(lambda network=network, inputs=inputs: network.run(inputs))
        limit_ms = gpu.weight_bytes(model) / read * 1e3
        figures = f"persistent {times[0]:.2f} ms, network {times[1]:.2f} ms, limit {limit_ms:.2f} ms"
        print(f"{kind or 'bfloat16':9} {figures}, difference {difference:.4f}")
        del model, cache, network, step


if __name__ == "__main__":
    main()
