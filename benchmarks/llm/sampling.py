"""Times the sampling kernels of a GPU for vocabularies and settings, and compares their tokens with the sampler's.

    python benchmarks/llm/sampling.py [--vocabularies 32000,128256] [--rows 1,32] [--spreads 1,3]

Printed are microseconds of all sampling kernels of a step, from graphs of many steps. All rows have the same settings;
logits are normal numbers times a spread.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from cuda_device import need_device

from flambeau.llm.backends.cuda.sampling_kernel import TokenChoice
from flambeau.llm.core.sequence import SamplingState
from flambeau.llm.sampling.row_groups import RowSettings
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.sampling_params import SamplingParams

STEPS = 20  # of a graph
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "all tokens": SamplingParams(temperature=0.8),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "top-k 200": SamplingParams(temperature=0.8, top_k=200),
    "top-k 1000": SamplingParams(temperature=0.8, top_k=1000),
    "top-k 4000": SamplingParams(temperature=0.8, top_k=4000),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "top-k 50, top-p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "min-p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
    "top-p 0.9, min-p 0.05": SamplingParams(temperature=1.0, top_p=0.9, min_p=0.05),
}


def microseconds(run: Callable[[], object]) -> float:
    """The median time of a step."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(STEPS):
            run()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end) / STEPS)
    return sorted(times)[2]


def measure(params: SamplingParams, num_rows: int, vocab_size: int, spread: float) -> str:
    """The time, with a word if a token is not the sampler's."""
    device = torch.device("cuda")
    states = [SamplingState(params, i, [0], 1) for i in range(num_rows)]
    logits_TV = torch.randn(num_rows, vocab_size, device=device) * spread
    expected_T = Sampler(vocab_size, device=device).sample(logits_TV.unsqueeze(1), states).view(-1)
    choice = TokenChoice(num_rows, vocab_size, device)
    choice.set(RowSettings.of(states, vocab_size))
    positions_T: Any = torch.zeros(num_rows, dtype=torch.int64, device=device)
    next_T = torch.zeros_like(positions_T)
    taken = microseconds(lambda: choice.run(logits_TV, positions_T, next_T))
    return f"{taken:8.1f}{'' if choice.chosen_T.tolist() == expected_T.tolist() else ' WRONG'}"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", default="32000,128256,151936,262144", help="default: %(default)s")
    parser.add_argument("--rows", default="1,32", help="default: %(default)s")
    parser.add_argument("--spreads", default="1,3", help="default: %(default)s")
    asked = parser.parse_args()
    need_device()
    rows = [int(text) for text in asked.rows.split(",")]
    for vocab_size in map(int, asked.vocabularies.split(",")):
        for spread in map(float, asked.spreads.split(",")):
            print(f"{vocab_size:,} tokens, logits of {spread}: µs with {asked.rows} rows")
            for name, params in SETTINGS.items():
                found = [measure(params, number, vocab_size, spread) for number in rows]
                print(f"  {name:24} {' '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
