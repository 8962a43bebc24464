"""The scorecard's page is what its result says, its cases are a table, and known inputs of the fuzzer stay harmless."""

from __future__ import annotations

import json
import re

import pytest
from scorecard import report
from scorecard.case import Case, Check, NotHere, Outcome, Scale, Stage, server_tracebacks
from scorecard.cases import CASES
from scorecard.fuzzing import corpus
from scorecard.fuzzing.search import apply_changes, one_batch, search
from scorecard.fuzzing.targets import TARGETS, Broken, Target, run_target
from scorecard.probes import percentile, waits_during
from scorecard.runner import run_here


def test_page_and_plot_are_made_from_the_newest_result():
    source = report.newest_result()
    assert source is not None
    result = json.loads(source.read_text())
    assert report.PAGE.read_text() == report.to_page(result, source.name)
    assert report.PLOT.read_text() == report.to_plot(result)


def test_result_names_no_folder_of_a_machine():
    source = report.newest_result()
    assert source is not None
    assert re.search(r"/(home|root|tmp|work|Users)/", source.read_text()) is None


def test_every_case_has_a_name_of_its_own_and_a_promise():
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.promise.endswith(".") for case in CASES)
    assert {case.group for case in CASES} == {*report.GROUPS}


def outcome_of(run, tmp_path, scale=None):
    return run_here(Case(name="c", group="faults", promise="p.", run=run), scale or Scale(), tmp_path)


def test_case_is_broken_if_one_bound_is(tmp_path):
    def run(stage):
        stage.at_most("time", 51.26, 50, "ms")
        stage.equal("status", 200, 200)
        stage.note("requests", 7)

    outcome = outcome_of(run, tmp_path)
    assert outcome.state == "broken"
    assert report.lines_of(outcome) == ["**time 51.3 ms (≤ 50)**", "status 200 (= 200)", "requests 7"]


def test_case_that_raises_is_broken_and_names_no_folder(tmp_path):
    def run(stage):
        raise ValueError(f"{stage.folder}/x is\nmissing")

    outcome = outcome_of(run, tmp_path)
    assert (outcome.state, outcome.trouble) == ("broken", "ValueError: …/x is")


def test_case_that_needs_what_is_not_here_is_not_run(tmp_path):
    def run(stage):
        raise NotHere("needs a GPU")

    outcome = outcome_of(run, tmp_path)
    assert (outcome.state, report.row(outcome)) == ("not run", ["–", "c", "p.", "needs a GPU"])


def test_what_never_happened_is_broken_on_any_machine(tmp_path):
    outcome = outcome_of(lambda stage: stage.within("gone after", None, 5), tmp_path, Scale(is_quick=True))
    assert report.lines_of(outcome) == ["**gone after never (≤ 5 s)**"]


def test_quick_run_is_patient_with_times_only(tmp_path):
    def run(stage):
        stage.at_most("time", 60, 50, "ms")
        stage.at_most("files", 3, 2)

    outcome = outcome_of(run, tmp_path, Scale(is_quick=True))
    assert [check.holds for check in outcome.checks] == [True, False]


def test_outcome_survives_json():
    outcome = Outcome(name="c", group="load", promise="p.", state="kept", seconds=1.0, checks=[Check("a", 1, "s")])
    assert Outcome.from_dict(json.loads(json.dumps(outcome.to_dict()))) == outcome


def test_cases_that_were_run_again_replace_earlier_ones_and_are_named():
    first, second, third = (
        Outcome(name=name, group="load", promise="p.", state=state, seconds=1.0).to_dict()
        for name, state in (("a", "kept"), ("b", "broken"), ("b", "kept"))
    )
    earlier = {"date": "then", "commit": "1", "outcomes": [first, second]}
    result = report.updated(earlier, {"date": "now", "commit": "2", "outcomes": [third]})
    assert (result["date"], result["outcomes"]) == ("then", [first, third])
    assert report.again(result) == ["Run again on commit `2`, now: b."]
    assert report.again(earlier) == []


def test_cell_of_the_page_holds_no_markup_of_a_measurement():
    check = Check("found", "a|b\n<script>", "", "= 0", False)
    outcome = Outcome(name="c", group="load", promise="p.", state="broken", seconds=1.0, checks=[check])
    assert report.row(outcome)[-1] == "**found a\\|b &lt;script> (= 0)**"


def test_tracebacks_of_the_server_are_recognized_by_their_last_line():
    log = "INFO fine\nTraceback (most recent call last):\n  File x\n    y\nValueError: z\n  | Traceback (most recent\n"
    assert server_tracebacks(log) == ["ValueError: z"]


def test_percentile_of_few_and_of_no_values():
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([], 0.99) == 0.0


def test_late_answer_counts_for_the_requests_that_would_have_come_meanwhile():
    assert waits_during(3.0) == [3.0]
    assert waits_during(35.0) == [35.0, 25.0, 15.0, 5.0]


# ---- fuzzing ----


@pytest.mark.parametrize(
    ("target", "file"),
    [
        pytest.param(target, file, id=f"{target.name}/{file.name}")
        for target in TARGETS
        for file in corpus.files_of(target.name)
    ],
)
def test_known_inputs_are_harmless(target, file):
    run_target(target, file.read_bytes())


def test_corpus_is_small():
    files = [file for file in (report.ROOT / "scorecard" / "corpus").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 1 << 20


def test_search_finds_a_fault_makes_it_small_and_finds_it_again(monkeypatch):
    def check(data):
        if data.count(b"ab") > 1:
            raise Broken("two")

    monkeypatch.setattr(corpus, "inputs_of", lambda name: [b"x" * 20, b"xxabxx"])
    target = Target("made up", check, (b"ab",))
    found = [search(target, seconds=20, start=1, max_faults=1) for _ in range(2)]
    assert found[0].faults == found[1].faults
    [fault] = found[0].faults
    assert (fault.error, fault.data.count(b"ab")) == ("Broken: two", 2)
    assert len(fault.data) < 12


def test_search_of_a_sound_target_finds_nothing():
    from hypothesis import strategies as st

    tried, fault = one_batch(st.binary(max_size=5), lambda data: None, 1)
    assert (tried > 10, fault) == (True, None)


def test_changes_are_applied_in_order():
    changes = [("insert", 0.0, b"AB"), ("overwrite", 0.0, b"C"), ("remove", 0.8, b"xx")]
    assert apply_changes(b"1234", changes, b"") == b"CB123"
    assert apply_changes(b"1234", [("cut", 0.5, b"")], b"wxyz") == b"12yz"


def test_input_without_end_is_a_fault(monkeypatch):
    monkeypatch.setattr("scorecard.fuzzing.targets.LIMIT_S", 0.05)

    def check(data):
        while True:
            pass

    with pytest.raises(Broken, match="no end"):
        run_target(Target("endless", check, ()), b"")


def test_stage_finds_handlers_by_their_file(tmp_path):
    from scorecard.case import handler_file

    assert handler_file("obedient.py").is_file()
    assert handler_file("echo.py").is_file()
    assert handler_file("--workers") == "--workers"
    assert Stage(tmp_path, Scale()).new_folder("a").is_dir()
