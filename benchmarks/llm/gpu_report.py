"""Turns results of `gpu.py` into a table and a plot: `gpu_report.py RESULT.json … [--docs docs/benchmarks.md]`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

from page import LIMIT, THEIRS, Bar, bars, report_main, table

GPT_FAST = {"1": 216, "32": 5421}  # bfloat16, measured before with the same shapes on the same kind of GPU

Result = Mapping[str, Any]


def kind(result: Result) -> str:
    return result["quantization"] or "bfloat16"


def sampled(result: Result, streams: str) -> str:
    """The rate of sampled requests; earlier results have none."""
    rate = result.get("medians_sampled_tokens_per_s", {}).get(streams)
    return f"{rate:,.0f}" if rate else ""


def markdown(results: Sequence[Result]) -> str:
    """The whole report."""
    first = results[0]
    rows = [
        [
            kind(result),
            f"{result['weights_gb']:.1f} GB",
            f"{result['ceiling_tokens_per_s']:,.0f}",
            f"{result['medians_tokens_per_s']['1']:,.0f}",
            f"{result['medians_tokens_per_s']['1'] / result['ceiling_tokens_per_s']:.0%}",
            sampled(result, "1"),
            f"{result['medians_tokens_per_s']['32']:,.0f}",
            sampled(result, "32"),
            f"{result['medians_first_token_ms']['1']:.0f} ms",
        ]
        for result in results
    ]
    head = ["weights", "read for a token", "ceiling", "one stream", "of the ceiling", "sampled"]
    head += ["32 streams", "sampled", "first token"]
    checks = [result["same_tokens"] for result in results if result["same_tokens"] is not None]
    checked = f"In float32 the graphs gave {'' if all(checks) else 'NOT '}the eager steps' tokens. " if checks else ""
    return "\n\n".join(
        [
            "![Tokens per second on a GPU](gpu.svg)",
            f"Measured {first['date'][:10]} on one {first['device']}, torch {first['torch']}: {first['preset']} with "
            "random weights, prompts of 6 tokens and 200 new ones, greedy and sampled (temperature 0.8, top-k 200), "
            "through the whole engine; tokens/s, medians of the rounds. The ceiling is what reading the weights once "
            "for each token would allow, at the "
            f"{first['read_gb_per_s']:,.0f} GB/s that a plain reduction reached in the same run.",
            *(f"    {result['command']}" for result in results[:1]),
            table(head, rows),
            f"gpt-fast gave {GPT_FAST['1']} and {GPT_FAST['32']:,} tokens/s in bfloat16 on the same kind of machine. "
            f"{checked}From the first request to "
            f"captured graphs it took {first['first_round_with_compilation_s']:.0f} s, in which eager steps answered.",
        ]
    )


def plot(results: Sequence[Result]) -> str:
    """Bars of one stream, beside the ceiling of each."""
    given = [Bar("gpt-fast, bfloat16", GPT_FAST["1"], THEIRS)]
    for result in results:
        given.append(Bar(f"{kind(result)}, one stream", result["medians_tokens_per_s"]["1"]))
        given.append(Bar(f"{kind(result)}, ceiling", result["ceiling_tokens_per_s"], LIMIT))
    return bars("Tokens per second of one stream, Llama-2-7B on one GPU", given)


if __name__ == "__main__":
    report_main(__doc__, "gpu", markdown, plot, many=True)
