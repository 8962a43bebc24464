"""Times attention of decode steps by the CUDA kernel and by the Triton kernel, beside the reading of keys and values.

    python benchmarks/llm/decode_attention.py [--heads 32,32 32,8] [--cases 32x107 200x100-1500]

Printed are microseconds of one layer in a CUDA graph of eight, with four caches in turn so that little stays in the L2
cache, and the share of what reading takes at the speed of a plain reduction. A case is a number of sequences and the
tokens of each, or a range of them.
"""

import argparse
import random
import sys
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import gpu  # noqa: E402
import torch  # noqa: E402
from cuda_device import need_device  # noqa: E402

from flambeau.llm.backends.cuda import decode_attention_kernel  # noqa: E402
from flambeau.llm.backends.cuda.attention import ScoreParts  # noqa: E402
from flambeau.llm.backends.cuda.decode_attention import attend_new_tokens  # noqa: E402
from flambeau.llm.backends.cuda.rope import HeadParts  # noqa: E402

SIZE, BLOCK_SIZE, LAYERS, ROUNDS, REPEATS = 128, 16, 4, 2, 6
CASES = "8x1000 32x107 32x1000 32x3500 64x107 128x107 128x600 220x760 200x100-1500"
TYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def lengths_of(case: str) -> list[int]:
    number, lengths = case.split("x")
    low, _, high = lengths.partition("-")
    rng = random.Random(0)
    return [rng.randint(int(low), int(high or low)) for _ in range(int(number))]


class Layers:
    """Some layers with their caches, whose blocks are in any order."""

    def __init__(self, lengths: list[int], num_heads: int, kv_heads: int, cached: torch.dtype) -> None:
        self.num_heads = num_heads
        numbers = [length // BLOCK_SIZE + 1 for length in lengths]
        blocks = (1 + torch.randperm(sum(numbers))).split(numbers)
        tables = torch.nn.utils.rnn.pad_sequence([*blocks], batch_first=True)
        positions = torch.tensor(lengths)
        slots = tables.gather(1, positions[:, None] // BLOCK_SIZE)[:, 0] * BLOCK_SIZE + positions % BLOCK_SIZE
        self.places = positions.cuda(), slots.cuda(), tables.cuda()
        shape = 1 + sum(numbers), BLOCK_SIZE, kv_heads, SIZE
        one = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(cached)
        self.caches = [(one.clone(), one.clone()) for _ in range(LAYERS)]
        width = (num_heads + 2 * kv_heads) * SIZE
        self.qkv = torch.randn(len(lengths), width, device="cuda", dtype=torch.bfloat16)
        angles = torch.rand(max(lengths) + 1, SIZE // 2, device="cuda")
        self.heads = HeadParts(tables=(angles.cos(), angles.sin()))
        self.counters = torch.zeros(LAYERS * ROUNDS, kv_heads, -(-len(lengths) // 4) * 4, dtype=torch.int32).cuda()
        self.read_bytes = sum(lengths) * 2 * kv_heads * SIZE * cached.itemsize

    def run(self) -> None:
        self.counters.zero_()
        for number, counters in enumerate(self.counters):
            options = self.num_heads, self.heads, ScoreParts(), SIZE**-0.5, 0, torch.bfloat16
            attend_new_tokens(self.qkv, *self.caches[number % LAYERS], *self.places, *options, counters)

    def microseconds(self) -> float:
        """The best time of a layer."""
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        times = []
        for _ in range(REPEATS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            torch.cuda.synchronize()
            times.append(began.elapsed_time(ended))
        return 1000 * min(times) / (LAYERS * ROUNDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="*", default=["32,32", "32,8"], help="heads, and those of keys and values")
    parser.add_argument("--cases", nargs="*", default=CASES.split())
    asked = parser.parse_args()
    need_device()
    torch.manual_seed(0)
    read = gpu.bandwidth("cuda")
    print(f"reading {read / 1e12:.2f} TB/s")
    for heads in asked.heads:
        for case in asked.cases:
            for name, cached in TYPES.items():
                layers = Layers(lengths_of(case), *map(int, heads.split(",")), cached)
                floor = 1e6 * layers.read_bytes / read
                now = layers.microseconds()
                with mock.patch.object(decode_attention_kernel, "is_supported", return_value=False):
                    triton = layers.microseconds()
                print(
                    f"{heads:6} {case:12} {name:8} reading {floor:6.1f}, Triton {triton:6.1f} ({floor / triton:.2f}), "
                    f"now {now:6.1f} ({floor / now:.2f}) microseconds",
                    flush=True,
                )


if __name__ == "__main__":
    main()
