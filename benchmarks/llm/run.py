"""Measures the engine on a CPU with the shipped model: one stream, 32 streams, speculation, and transformers beside.

    python benchmarks/llm/run.py [--rounds 3] [--tokens 200]

Every round runs all of them in turn, in processes of their own with the same number of threads; ratios are taken
within a round, and the medians over the rounds are kept in a dated JSON file. Takes a few minutes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "serving"))

import machine  # noqa: E402
import results  # noqa: E402

SUBJECTS = ("transformers", "plain", "draft", "lookup")
GOALS = {  # ratio → (least, of what)
    "one stream / transformers.generate": 3.0,
    "32 streams / one stream": 6.0,
    "speculation / plain, one stream": 1.3,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens of each stream (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default %(default)s)")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    return parser.parse_args()


def measure(subject: str, asked: argparse.Namespace) -> dict[str, Any]:
    """One subject in a process of its own."""
    command = [sys.executable, str(HERE / "subject.py"), subject, str(asked.tokens), str(asked.threads)]
    before = machine.Usage.now({})
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    noise = machine.cores_between(before, machine.Usage.now({}))
    return {**json.loads(answer.stdout.splitlines()[-1]), "steal_cores": noise["steal_cores"]}


def ratios(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What is promised, from one round."""
    plain = found["plain"]
    return {
        "one stream / transformers.generate": plain["one"] / found["transformers"]["one"],
        "32 streams / one stream": plain["many"] / plain["one"],
        "speculation / plain, one stream": found["draft"]["one"] / plain["one"],
        "look-up / plain, one stream": found["lookup"]["one"] / plain["one"],
        "speculation / plain, 32 streams": found["draft"]["many"] / plain["many"],
    }


def main() -> None:
    asked, began = arguments(), time.monotonic()
    rounds: list[dict[str, Any]] = []
    for number in range(asked.rounds):
        found = {subject: measure(subject, asked) for subject in SUBJECTS}
        rounds.append({"round": number + 1, "tokens_per_s": found, "ratios": ratios(found)})
        for subject, figures in found.items():
            print(f"round {number + 1}: {subject:14} {figures}", file=sys.stderr)
    http = json.loads(
        subprocess.run(
            [sys.executable, str(HERE / "first_token.py")], check=True, capture_output=True, text=True
        ).stdout
    )
    print(f"first token: {http}", file=sys.stderr)
    medians = {name: statistics.median(r["ratios"][name] for r in rounds) for name in rounds[0]["ratios"]}
    for name, value in medians.items():
        goal = f"  (goal {GOALS[name]:g}: {'met' if value >= GOALS[name] else 'MISSED'})" if name in GOALS else ""
        print(f"{name:40} {value:6.2f}{goal}")
    date = datetime.now(UTC)
    result = {
        "date": date.isoformat(timespec="seconds"),
        "command": f"python benchmarks/llm/run.py --rounds {asked.rounds} --tokens {asked.tokens}",
        "duration_s": round(time.monotonic() - began),
        "machine": machine.describe(),
        "versions": results.versions(Path(sys.executable), Path("none")),
        "threads": asked.threads,
        "goals": GOALS,
        "medians": medians,
        "http": http,
        "rounds": rounds,
    }
    file = asked.out / f"{date:%Y-%m-%d-%H%M}-llm.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(file)


if __name__ == "__main__":
    main()
