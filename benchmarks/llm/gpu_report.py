"""Turns a result of `gpu.py` into tables and a plot: `gpu_report.py RESULT.json [--docs docs/benchmarks.md]`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

from page import LIMIT, THEIRS, Bar, bars, report_main, table

GPT_FAST = {"1": 216, "32": 5421}  # bfloat16, measured before with the same shapes on the same kind of GPU
NAMES = {"none": "bfloat16"}
STREAMS = (1, 8, 32, 128)
SHORT = 100  # tokens; longer prompts are contexts

Result = Mapping[str, Any]


def figures(result: Result, kind: str) -> Mapping[str, Result]:
    found: Mapping[str, Result] = result["kinds"][kind]["figures"]
    return found


def cell(figure: Result | None) -> str:
    """The rate, and its share of the ceiling."""
    if figure is None:
        return ""
    return f"{figure['tokens_per_s']:,.0f} ({figure['tokens_per_s'] / figure['ceiling_tokens_per_s']:.0%})"


def of_streams(result: Result, settings: str) -> str:
    """A row for each kind of weights."""
    rows = []
    for kind, found in result["kinds"].items():
        mine = {f["streams"]: f for f in found["figures"].values() if f["settings"] == settings and f["prompt"] < SHORT}
        rows.append([NAMES.get(kind, kind), f"{found['weights_gb']:.1f} GB", *(cell(mine.get(n)) for n in STREAMS)])
    head = [f"{settings}, tokens/s", "weights", *(f"{n} stream{'s' if n > 1 else ''}" for n in STREAMS)]
    return table(head, rows)


def of_contexts(result: Result) -> str:
    every = [figure for kind in result["kinds"] for figure in figures(result, kind).values()]
    columns = sorted({(f["prompt"], f["streams"]) for f in every if f["prompt"] >= SHORT})
    rows = []
    for kind in result["kinds"]:
        mine = {(f["prompt"], f["streams"]): f for f in figures(result, kind).values()}
        rows.append([NAMES.get(kind, kind), *(cell(mine.get(column)) for column in columns)])
    return table(["greedy, tokens/s", *(f"{n} × {prompt:,} tokens" for prompt, n in columns)], rows)


def of_extras(extras: Result) -> str:
    lines = []
    if long := extras.get("long_prompts"):
        lines.append(
            f"Prompts of {long['prompt_tokens']:,} tokens that arrive among 32 streams: the time between two tokens of "
            f"the others is {long['gap_p50_ms']:.1f} ms, {long['gap_p99_ms']:.1f} ms at the 99th percentile."
        )
    if prompts := extras.get("prompts"):
        lines.append(
            f"Prompts alone: {prompts['prompt_tokens_per_s']:,.0f} tokens/s, {prompts['of_the_matmul_rate']:.0%} of "
            "the rate of a large product of matrices in the same run."
        )
    if mixed := extras.get("mixed"):
        lines.append(
            f"{mixed['requests']} requests of 100 to 1,024 tokens in and out, all at once: "
            f"{mixed['output_tokens_per_s']:,.0f} new tokens/s."
        )
    if http := extras.get("http"):
        rates = [f"{value:,.0f} with {name.split()[-1]}" for name, value in http.items() if name.startswith("tokens")]
        lines.append(f"Through HTTP, tokens/s of greedy streams: {', '.join(rates)}.")
    return " ".join(lines)


def markdown(result: Result) -> str:
    """The whole report."""
    compile_s = next(iter(result["kinds"].values()))["first_round_with_compilation_s"]
    checked = result["same_tokens"]
    return "\n\n".join(
        [
            "![Tokens per second on a GPU](gpu.svg)",
            f"Measured {result['date'][:10]} on one {result['device']}, torch {result['torch']}: {result['preset']} "
            "with random weights, prompts of 6 tokens, greedy and sampled (temperature 0.8, top-k 200), through the "
            "whole engine. Counted are steps in which all streams run. In brackets: the share of the ceiling, which is "
            "what reading the weights and the cached keys and values once for each step would allow, at the "
            f"{result['read_gb_per_s']:,.0f} GB/s that a plain reduction reached in the same run.",
            f"    {result['command']}",
            of_streams(result, "greedy"),
            of_streams(result, "sampled"),
            of_contexts(result),
            of_extras(result.get("extras", {})),
            f"gpt-fast gave {GPT_FAST['1']} and {GPT_FAST['32']:,} tokens/s for 1 and 32 streams in bfloat16 on the "
            "same kind of machine. "
            + ("" if checked is None else f"In float32 the graphs gave {'' if checked else 'NOT '}the eager tokens. ")
            + f"Compiling and capturing the first kind's graphs took {compile_s:.0f} s, in which eager steps answered.",
        ]
    )


def plot(result: Result) -> str:
    """Bars of 32 streams, beside the ceiling of each."""
    given = [Bar("gpt-fast, bfloat16", GPT_FAST["32"], THEIRS)]
    for kind in result["kinds"]:
        figure = next(f for f in figures(result, kind).values() if f["streams"] == 32 and f["settings"] == "greedy")
        given.append(Bar(f"{NAMES.get(kind, kind)}, 32 streams", figure["tokens_per_s"]))
        given.append(Bar(f"{NAMES.get(kind, kind)}, ceiling", figure["ceiling_tokens_per_s"], LIMIT))
    return bars("Tokens per second of 32 streams, Llama-2-7B on one GPU", given)


if __name__ == "__main__":
    report_main(__doc__, "gpu", markdown, plot)
