"""Turns results of `cpu.py` into a table and a plot: `cpu_report.py RESULT.json … [--docs docs/benchmarks.md]`.

Of several results the later one counts where both have the same kind of weights and the same job.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

from page import THEIRS, Bar, bars, report_main, table

Result = Mapping[str, Any]
JOBS = ("one stream", "8 streams", "32 streams", "prompt of 512")
THEIR_KINDS = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0", "int4": "q4_0"}


def rows_of(results: Sequence[Result]) -> dict[tuple[str, str], Result]:
    """The summaries by kind of weights and job."""
    return {(row["kind"], row["job"]): row for result in results for row in result["summary"]}


def clock_of(results: Sequence[Result]) -> str:
    """With one thread the time of the processor, which neighbors change least; else the time on the clock."""
    return "cpu" if all(result["threads"] == 1 for result in results) else "wall"


def memory_table(results: Sequence[Result]) -> str:
    """Resident memory beside the weights and the KV cache; empty for results without it."""
    lines = []
    for memory in {each["kind"]: each for result in results for each in result.get("memory", [])}.values():
        for program in ("flambeau", "llama.cpp"):
            sizes = [memory[program][f"{name}_bytes"] for name in ("weights", "cache", "resident")]
            share = f"{sizes[2] / (sizes[0] + sizes[1]):.2f}"
            lines.append([memory["kind"], program, *(f"{size / 1e9:.3f}" for size in sizes), share])
    return table(["weights", "", "weights, GB", "KV cache, GB", "resident, GB", "of both"], lines) if lines else ""


def markdown(results: Sequence[Result]) -> str:
    rows, clock, last = rows_of(results), clock_of(results), results[-1]
    kinds = dict.fromkeys(kind for kind, _ in rows)
    lines = []
    for kind in kinds:
        cells = [
            f"{row[f'flambeau {clock}']:,.0f} / {row[f'llama.cpp {clock}']:,.0f} = {row[f'ratio {clock}']:.2f}"
            if (row := rows.get((kind, job)))
            else "–"
            for job in JOBS
        ]
        lines.append([f"{kind} ({THEIR_KINDS[kind]})", *cells])
    words = {"cpu": "tokens per second of processor time, one thread each", "wall": "tokens per second on the clock"}
    threads = "one thread" if last["threads"] == 1 else f"{last['threads']} threads"
    return "\n".join(
        [
            "![Tokens per second on a CPU beside llama.cpp](cpu.svg)",
            "",
            f"Flambeau / llama.cpp = their ratio, in {words[clock]}; medians of the rounds, in which the programs take "
            f"turns. Measured {last['when'][:10]} with {threads} of {last['machine']['cpu']}, "
            f"random weights of the shape {last['shape']}, greedy.",
            "",
            table(["weights (theirs)", *JOBS], lines),
            *(["", memory] if (memory := memory_table(results)) else []),
        ]
    )


def plot(results: Sequence[Result]) -> str:
    """Two bars for each kind of weights: one stream."""
    rows, clock = rows_of(results), clock_of(results)
    given = []
    for (kind, job), row in rows.items():
        if job == JOBS[0]:
            given.append(Bar(f"flambeau, {kind}", row[f"flambeau {clock}"]))
            given.append(Bar(f"llama.cpp, {THEIR_KINDS[kind]}", row[f"llama.cpp {clock}"], THEIRS))
    return bars(f"Tokens per second of one stream on a CPU, {results[-1]['shape']}", given)


if __name__ == "__main__":
    report_main(__doc__, "cpu", markdown, plot, many=True)
