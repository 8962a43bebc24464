"""Trial: the rate at which one product of a row reads a large matrix."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import dataclasses  # noqa: E402

import gpu  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from flambeau.llm.backends.cuda import one_row_step as o  # noqa: E402
from flambeau.llm.quantize.int4 import Int4Linear  # noqa: E402
from flambeau.llm.quantize.packed_layers import CudaInt4Linear  # noqa: E402
from flambeau.llm.quantize.row_scaled import Int8Linear  # noqa: E402

print(f"reduction {gpu.bandwidth('cuda') / 1e12:.2f} TB/s")
MAKE = {
    "bf16": lambda x: x,
    "int8": Int8Linear.from_linear,
    "int4": lambda x: CudaInt4Linear(Int4Linear.from_linear(x, 64)),
}
with torch.inference_mode():
    for kind, make in MAKE.items():
        linear = nn.Linear(4096, 65536, bias=False, device="cuda", dtype=torch.bfloat16)
        layer = make(linear)
        x, y = torch.randn(4096, device="cuda").bfloat16(), torch.empty(65536, device="cuda", dtype=torch.bfloat16)
        nbytes = layer.weight.nbytes
        for unrolled, warps, chunks, shared in [
            (1, 8, 2, 112), (1, 8, 4, 112), (1, 16, 2, 112), (0, 8, 2, 112), (0, 8, 4, 112), (0, 16, 2, 112), (0, 8, 2, 56), (0, 8, 2, 200),
        ]:  # fmt: skip
            o.UNROLLED, o.SHARED_BYTES = bool(unrolled), shared << 10
            for k in o.NUM_WARPS:
                o.NUM_WARPS[k], o.MAX_CHUNKS[k] = warps, chunks
            found = []
            kernel = o.row_kernel(layer)
            for blocks in (132, 264):
                each = dataclasses.replace(kernel, num_blocks=blocks)
                each(x, y)
                torch.cuda.synchronize()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(10):
                    each(x, y)
                end.record()
                torch.cuda.synchronize()
                found.append(nbytes * 10 / begin.elapsed_time(end) / 1e9)
            print(kind, unrolled, warps, chunks, shared, kernel.shape, [f"{rate:.2f} TB/s" for rate in found])
