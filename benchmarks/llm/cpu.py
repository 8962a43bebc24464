"""Measures generation on a CPU beside llama.cpp: one, 8 and 32 streams and a long prompt, for each kind of weights.

    python benchmarks/llm/cpu.py --llama-python PYTHON [--openvino-python PYTHON] [--shape smollm-135m] [--rounds 5]

    python benchmarks/llm/cpu.py --llama-python PYTHON --perplexity
    python benchmarks/llm/cpu.py --llama-python PYTHON --gguf FILE --text FILE [--threads 1]

PYTHON is an interpreter with `llama-cpp-python` and `gguf` (a virtual environment of its own: compiling takes minutes).
It makes random checkpoints of the shape, the same weights for both programs, and keeps them in --folder. Both programs
stay loaded and take turns, so that a busy moment of the machine meets both; ratios are taken within a round. Beside the
time on the clock there is the time of the processors: with one thread, neighbors on the machine change it least.
Memory is what each process has resident after its last job. The result is a dated JSON file; progress goes to stderr.

--perplexity compares the rounding of both programs instead: the perplexity of texts that the shipped storyteller
generated itself, after its prompt, with the weights of the storyteller, and the divergence from its distributions in
float32. There are as many texts as seeds.

--gguf measures both programs with the same GGUF file instead, and with its weights as float32 numbers, about which the
programs must agree. Prompts are parts of the text, whose perplexity is compared, too; divergences are those from what
is computed first, by Flambeau. The kinds are float32 and file.

With --openvino-python, an interpreter with `openvino`, that takes its turn too: openvino_network.py builds the network
for it from the same checkpoint. Its int8 and int4 weights are rounded as its own tools do; its cache is its default.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "serving"))

import machine  # noqa: E402
import results  # noqa: E402

PAIRS = {  # our kind of weights → checkpoint, llama.cpp's kind
    "float32": ("float32", "f32"),
    "bfloat16": ("bfloat16", "bf16"),
    "int8": ("float32", "q8_0"),
    "int4": ("float32", "q4_0"),
}
JOBS = {  # what is measured → job, lap that counts, tokens in it
    "one stream": ({"streams": 1, "prompt": 32, "tokens": 64}, "rest", 63),
    "8 streams": ({"streams": 8, "prompt": 32, "tokens": 24}, "rest", 8 * 23),
    "32 streams": ({"streams": 32, "prompt": 16, "tokens": 16}, "rest", 32 * 15),
    "prompt of 512": ({"streams": 1, "prompt": 512, "tokens": 1}, "first", 512),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter with llama_cpp and gguf")
    parser.add_argument("--openvino-python", help="an interpreter with openvino; without, it is not compared")
    parser.add_argument("--shape", default="smollm-135m", help="of cpu_checkpoints.py (default %(default)s)")
    parser.add_argument("--kinds", default="", help=f"default: {','.join(PAIRS)}; with --gguf: float32,file")
    parser.add_argument("--jobs", default=",".join(JOBS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="of each program (default %(default)s)")
    parser.add_argument("--perplexity", action="store_true", help="compare perplexities, not times")
    parser.add_argument(
        "--seeds", default="1", help="of the texts for --perplexity, such as 1,2,3 (default %(default)s)"
    )
    parser.add_argument("--gguf", type=Path, help="measure both programs with this file")
    parser.add_argument("--text", type=Path, help="for --gguf: where prompts come from")
    parser.add_argument("--text-bytes", type=int, default=64 << 10, help="of the text for --gguf (default %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "flambeau" / "benchmark-checkpoints")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    asked = parser.parse_args()
    if (asked.gguf is None) != (asked.text is None):
        parser.error("--gguf needs --text, a file of plain text, and the other way around")
    asked.kinds = asked.kinds or ("float32,file" if asked.gguf else ",".join(PAIRS))
    return asked


class Subject:
    """A program with one model, in a process of its own."""

    def __init__(self, python: str, program: str, path: Path, kind: str, threads: int) -> None:
        command = [python, str(HERE / "cpu_subject.py"), program, str(path), kind, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}")
        return json.loads(line)  # type: ignore[no-any-return]


def progress(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


def compare(kind: str, asked: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All rounds of one kind of weights, and the memory of the programs after them."""
    checkpoint, theirs = PAIRS[kind]
    progress(f"{kind}: loading the programs")
    subjects = {
        "flambeau": Subject(sys.executable, "flambeau", folder / checkpoint, kind, asked.threads),
        "llama.cpp": Subject(asked.llama_python, "llama.cpp", folder / f"{theirs}.gguf", theirs, asked.threads),
    }
    if asked.openvino_python:
        subjects["openvino"] = Subject(asked.openvino_python, "openvino", folder / checkpoint, kind, asked.threads)
    return measure(kind, asked, subjects)


def measure(
    kind: str, asked: argparse.Namespace, subjects: dict[str, Subject], text: list[int] | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All rounds of the jobs, and the memory of the programs after them, which end then."""
    records = []
    for round_ in range(-1, asked.rounds):  # the first one warms up
        for name in asked.jobs.split(","):
            job, lap, count = JOBS[name]
            asked_job = {**job, "seed": round_ + 1, "text": text}
            replies = {program: each.run(asked_job) for program, each in subjects.items()}
            if round_ < 0:
                progress(f"{kind}, {name}: warmed up")
                continue
            record: dict[str, Any] = {"kind": kind, "job": name, "round": round_}
            for program, reply in replies.items():
                record[program] = {"wall": count / reply[f"{lap}_s"], "cpu": count / reply[f"{lap}_cpu_s"]}
            own = replies["flambeau"]["ids"]
            for program in replies.keys() - {"flambeau"}:
                same = sum(a == b for a, b in zip(own, replies[program]["ids"], strict=True)) / len(own)
                record[SAME.get(program, f"same_tokens {program}")] = same
            records.append(record)
            rates = " and ".join(f"{program} {record[program]['wall']:.0f}" for program in replies)
            progress(f"{kind}, {name}, round {round_ + 1} of {asked.rounds}: {rates} tokens/s")
    memory: dict[str, Any] = {"kind": kind}
    for program, subject in subjects.items():
        memory[program] = subject.run({"memory": True})
        subject.close()
    return records, memory


def programs_in(records: list[dict[str, Any]]) -> list[str]:
    return [program for program in PROGRAMS if program in records[0]]


PROGRAMS = ("flambeau", "llama.cpp", "openvino")
RATIO, SAME = {"llama.cpp": "ratio"}, {"llama.cpp": "same_tokens"}  # the names that older results have


def summarize(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of the rounds, the best of them, and the median of their ratios, for each kind and job."""
    rows = []
    for kind, job in dict.fromkeys((record["kind"], record["job"]) for record in records):
        some = [record for record in records if (record["kind"], record["job"]) == (kind, job)]
        row: dict[str, Any] = {"kind": kind, "job": job}
        for clock in ("wall", "cpu"):
            for program in programs_in(some):
                rates = [record[program][clock] for record in some]
                row[f"{program} {clock}"] = round(statistics.median(rates), 1)
                row[f"{program} {clock} best"] = round(max(rates), 1)
            for program in programs_in(some)[1:]:
                ratios = [record["flambeau"][clock] / record[program][clock] for record in some]
                name = RATIO.get(program, f"ratio {program}")
                best = row[f"flambeau {clock} best"] / row[f"{program} {clock} best"]
                row[f"{name} {clock}"], row[f"{name} {clock} best"] = (
                    round(statistics.median(ratios), 2),
                    round(best, 2),
                )
        for name in (name for name in some[0] if name.startswith("same_tokens")):
            row[name] = round(statistics.mean(record[name] for record in some), 2)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The summary as Markdown: tokens/s on the clock, and the ratios on both clocks."""
    found = []
    for other in (program for program in PROGRAMS[1:] if f"{program} wall" in rows[0]):
        lines = [
            f"| weights | | flambeau tokens/s | {other} tokens/s | ratio | ratio of best rounds | ratio of CPU time |",
            "|---|---|---|---|---|---|---|",
        ]
        name = RATIO.get(other, f"ratio {other}")
        for row in rows:
            rates = (f"{row[f'{p} wall']:.0f} (best {row[f'{p} wall best']:.0f})" for p in ("flambeau", other))
            ratios = (f"{row[f'{name} {clock}']:.2f}" for clock in ("wall", "wall best", "cpu"))
            lines.append(f"| {row['kind']} | {row['job']} | {' | '.join((*rates, *ratios))} |")
        found.append("\n".join(lines))
    return "\n\n".join(found)


def memory_table(memories: list[dict[str, Any]]) -> str:
    """Resident memory beside what a model needs: its weights and the KV cache."""
    lines = ["| weights | | weights, GB | KV cache, GB | resident, GB | of both |", "|---|---|---|---|---|---|"]
    for memory in memories:
        for program in programs_in([memory]):
            weights, cache, resident = (memory[program][f"{name}_bytes"] for name in ("weights", "cache", "resident"))
            share = f"{resident / (weights + cache):.2f} ×" if cache else "–"  # OpenVINO does not tell
            sizes = (f"{each / 1e9:.3f}" for each in (weights, cache, resident))
            lines.append(f"| {memory['kind']} | {program} | {' | '.join(sizes)} | {share} |")
    return "\n".join(lines)


STORYTELLER = results.REPOSITORY / "src" / "flambeau" / "examples" / "storyteller" / "target"
PROMPT, TEXTS, TEXT_TOKENS = "Once upon a time", 64, 256


def generated_rows(seed: int) -> tuple[int, list[list[int]]]:
    """The length of the prompt, and the prompt with what the storyteller generates after it at temperature 1."""
    from flambeau.llm.engine import Engine

    engine = Engine.from_pretrained(STORYTELLER, device="cpu")
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(PROMPT)
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": TEXT_TOKENS, "ignore_eos": True, "seed": seed}
    texts = engine.generate([prompt], n=TEXTS, **options)  # each choice draws other numbers
    engine.close()
    rows = [[*prompt, *text.token_ids] for text in texts]
    assert len({tuple(row) for row in rows}) == TEXTS
    return len(prompt), rows


def compare_perplexities(asked: argparse.Namespace) -> None:
    """A row for each kind of weights and text; then the means and how the texts differ."""
    folder = asked.folder / "storyteller"
    subprocess.run([asked.llama_python, str(HERE / "cpu_checkpoints.py"), str(folder), str(STORYTELLER)], check=True)
    print("| weights (theirs) | seed | flambeau | llama.cpp | divergence: flambeau | llama.cpp |")
    print("|---|---|---|---|---|---|")
    found: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in asked.kinds.split(",")}
    for seed in asked.seeds.split(","):
        skipped, rows = generated_rows(int(seed))
        with tempfile.TemporaryDirectory() as scratch:
            job = {"rows": rows, "skip": skipped, "reference": f"{scratch}/float32"}
            score(sys.executable, "flambeau", STORYTELLER, "float32", job, asked)  # the reference
            for kind in found:
                theirs = PAIRS[kind][1]
                pair = [
                    score(sys.executable, "flambeau", STORYTELLER, kind, job, asked),
                    score(asked.llama_python, "llama.cpp", folder / f"{theirs}.gguf", theirs, job, asked),
                ]
                found[kind].append(pair)
                print(f"| {kind} ({theirs}) | {seed} | {cells(pair)} |", flush=True)
    for kind, pairs in found.items():
        means = [
            {name: statistics.mean(pair[i][name] for pair in pairs) for name in ("perplexity", "divergence")}
            for i in (0, 1)
        ]
        print(f"| {kind} ({PAIRS[kind][1]}) | mean | {cells(means)} |\n\n{loss_difference(pairs)}\n")


def score(
    python: str, program: str, path: Path, kind: str, job: dict[str, Any], asked: argparse.Namespace
) -> dict[str, Any]:
    subject = Subject(python, program, path, kind, asked.threads)
    found = subject.run(job)
    subject.close()
    return found


def cells(pair: list[dict[str, Any]]) -> str:
    return " | ".join(
        (*(f"{each['perplexity']:.4f}" for each in pair), *(f"{each['divergence']:.2e}" for each in pair))
    )


def loss_difference(pairs: list[list[dict[str, Any]]]) -> str:
    """The mean difference of the logarithms of both perplexities, row by row, with its standard error."""
    differences = [
        own - their for pair in pairs for own, their in zip(pair[0]["losses"], pair[1]["losses"], strict=True)
    ]
    mean, error = statistics.mean(differences), statistics.stdev(differences) / len(differences) ** 0.5
    return (
        f"Perplexity of Flambeau beside llama.cpp: {100 * mean:+.3f} % (standard error {100 * error:.3f} %, "
        f"{len(differences)} rows)"
    )


# ---- a GGUF file ----

ROW_TOKENS = 512


def compare_gguf(asked: argparse.Namespace) -> None:
    from flambeau.llm.text.tokenizer import load_tokenizer

    files = {"float32": asked.folder / f"{asked.gguf.stem}.f32.gguf", "file": asked.gguf}
    kinds = {kind: files[kind] for kind in asked.kinds.split(",")}
    if "float32" in kinds:
        asked.folder.mkdir(parents=True, exist_ok=True)
        command = [asked.llama_python, str(HERE / "cpu_checkpoints.py"), "--dequantize"]
        subprocess.run([*command, str(asked.gguf), str(files["float32"])], check=True)
    with asked.text.open("rb") as file:
        text = load_tokenizer(asked.gguf).encode(file.read(asked.text_bytes).decode(errors="ignore"))
    rows = [text[start : start + ROW_TOKENS] for start in range(0, len(text) - ROW_TOKENS + 1, ROW_TOKENS)]
    if not rows:
        raise SystemExit(f"{asked.text} has {len(text)} tokens; at least {ROW_TOKENS} are needed")
    quality = []
    with tempfile.TemporaryDirectory() as scratch:
        job = {"rows": rows, "skip": 1, "reference": f"{scratch}/float32"}
        for kind, path in kinds.items():
            pair = [
                score(sys.executable, "flambeau", path, kind, job, asked),
                score(asked.llama_python, "llama.cpp", path, kind, job, asked),
            ]
            quality.append({"kind": kind, "flambeau": pair[0], "llama.cpp": pair[1]})
            print(f"| {kind} | {cells(pair)} |\n\n{loss_difference([pair])}\n", flush=True)
    before, measured = machine.Usage.now({}), []
    for kind, path in kinds.items():
        progress(f"{kind}: loading the programs")
        subjects = {
            "flambeau": Subject(sys.executable, "flambeau", path, kind, asked.threads),
            "llama.cpp": Subject(asked.llama_python, "llama.cpp", path, kind, asked.threads),
        }
        measured.append(measure(kind, asked, subjects, text))
    write_result(asked, asked.gguf.stem, measured, before, {"text_tokens": len(rows) * ROW_TOKENS, "quality": quality})


def write_result(
    asked: argparse.Namespace,
    name: str,
    measured: list[tuple[list[dict[str, Any]], dict[str, Any]]],
    before: machine.Usage,
    more: dict[str, Any],
) -> None:
    noise = machine.cores_between(before, machine.Usage.now({}))
    records, memories = [record for some, _ in measured for record in some], [memory for _, memory in measured]
    rows = summarize(records)
    print(table(rows), memory_table(memories), sep="\n\n")
    now = datetime.now(UTC)
    result = {
        "when": now.isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "shape": name,
        "threads": asked.threads,
        "steal_cores": noise["steal_cores"],
        **more,
        "summary": rows,
        "memory": memories,
        "records": records,
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"{now:%Y-%m-%d-%H%M}-llm-cpu-{name.lower()}-{asked.threads}.json"
    path.write_text(json.dumps(result, indent=1))
    print(path)


def main() -> None:
    asked = arguments()
    if asked.perplexity:
        compare_perplexities(asked)
        return
    if asked.gguf:
        compare_gguf(asked)
        return
    folder = asked.folder / asked.shape
    files = ",".join({name for kind in asked.kinds.split(",") for name in PAIRS[kind]})
    progress(f"checkpoints of the shape {asked.shape} in {folder}; those that are not there are made")
    subprocess.run([asked.llama_python, str(HERE / "cpu_checkpoints.py"), str(folder), asked.shape, files], check=True)
    before = machine.Usage.now({})
    write_result(asked, asked.shape, [compare(kind, asked, folder) for kind in asked.kinds.split(",")], before, {})


if __name__ == "__main__":
    main()
