"""The command: run the cases, save the result, write docs/reliability.md."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from scorecard import report
from scorecard.case import Outcome, Scale
from scorecard.cases import CASES
from scorecard.runner import run_cases, run_here


def main() -> int:
    arguments = parse_arguments()
    if arguments.case:
        return run_child(arguments)
    if arguments.page:
        report.write_page(json.loads(arguments.page.read_text()), arguments.page)
        return 0
    scale = Scale(arguments.quick, arguments.chaos_s, arguments.fuzz_s, arguments.seed)
    cases = [case for case in CASES if not arguments.quick or case.is_quick]
    if arguments.only:
        words = [word.lower() for word in arguments.only]
        cases = [case for case in cases if any(word in f"{case.group} {case.name}".lower() for word in words)]
    if arguments.list:
        print("\n".join(f"{case.group:8} {'quick' if case.is_quick else '':6} {case.name}" for case in cases))
        return 0
    load, began = report.load_average(), time.monotonic()
    outcomes = run_cases(cases, scale, show)
    num_broken = sum(outcome.state == "broken" for outcome in outcomes)
    print(f"{len(outcomes)} cases in {time.monotonic() - began:.0f} s, {num_broken} broken")
    if arguments.update or not (arguments.quick or arguments.only):
        result = report.result_of(outcomes, scale, load)
        if arguments.update and (source := report.newest_result()) is not None:
            result = report.updated(json.loads(source.read_text()), result)
        file = report.save(result)
        report.write_page(result, file)
        print(f"wrote {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file.name}")
    return 1 if num_broken else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scorecard", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a subset in smaller numbers; writes no page")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="cases whose group or name contains this; repeatable",
    )
    parser.add_argument("--update", action="store_true", help="put them into the newest result, and write the page")
    parser.add_argument("--list", action="store_true", help="show the cases")
    parser.add_argument("--chaos-s", type=float, default=60, help="seconds of chaos (60)")
    parser.add_argument("--fuzz-s", type=float, default=6, help="seconds of search for each target of the fuzzer (6)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (0)")
    parser.add_argument("--page", type=Path, metavar="RESULT", help="write the page again from a result")
    for name in ("--case", "--out", "--folder", "--scale"):  # for the processes of single cases
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_child(arguments: argparse.Namespace) -> int:
    """Run one case in this process."""
    case = next(case for case in CASES if case.name == arguments.case)
    folder = Path(arguments.folder) / "stage"
    folder.mkdir()
    outcome = run_here(case, Scale(**json.loads(arguments.scale)), folder)
    Path(arguments.out).write_text(json.dumps(outcome.to_dict()))
    return 0


def show(outcome: Outcome) -> None:
    print(f"{report.MARKS[outcome.state]} {outcome.name} ({outcome.seconds:g} s)", flush=True)
    for line in report.lines_of(outcome):
        if line.startswith("**") or outcome.state == "not run":
            print(f"    {line.strip('*')}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
