"""Crash bundles: what they hold, who may read them, and how many there are."""

from __future__ import annotations

import hashlib
import json

import pytest

from flambeau.errors import ConfigError
from flambeau.serving import crash_bundles
from flambeau.serving.crash_bundles import CrashBundles, CrashReport, list_bundles, read_bundle, read_requests
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import WorkerRef
from flambeau.serving.job import RequestBody
from support.jobs import new_job

CRASH = WorkerExit(reason="exited with code 3", exit_code=3, last_lines=("first", "last"), stacks="File x\n")
BODY = b'{"text": "private"}'


def job_with(body=BODY):
    headers = [("Content-Type", "application/json"), ("Authorization", "Bearer hidden"), ("x-more", "1")]
    return new_job(body=RequestBody(body), headers=headers)


def report_of(*jobs, death=CRASH, at=1000.0, **model):
    return CrashReport(
        at=at,
        worker=WorkerRef(9000, "my/model", "1.0"),
        pids=[7],
        age_s=1.5,
        device=None,
        exit=death,
        model={"name": "my/model", **model},
        requests=read_requests((job, 2) for job in jobs),
    )


@pytest.fixture
def write(tmp_path):
    def write_bundles(*reports, num_kept=20, with_payloads=False):
        bundles = CrashBundles(tmp_path / "logs" / "crashes", num_kept=num_kept, with_payloads=with_payloads)
        paths = [bundles.add(report) for report in reports]
        bundles.close()
        return bundles.folder, paths

    return write_bundles


def test_bundle_holds_the_cause_and_a_fingerprint_of_the_request_but_not_the_request(write):
    folder, [path] = write(report_of(job_with()))
    [found] = list_bundles(folder)
    assert str(found) == path
    document = read_bundle(found)
    assert (document["kind"], document["reason"], document["exitCode"]) == ("crash", "exited with code 3", 3)
    [request] = document["requests"]
    assert request["sha256"] == hashlib.sha256(BODY).hexdigest()
    assert (request["sizeInBytes"], request["contentType"], request["batchSize"]) == (len(BODY), "application/json", 2)
    assert document["versions"].keys() >= {"flambeau", "python"}
    assert (found / "stacks.txt").read_text() == "File x\n"
    assert (found / "output.txt").read_text() == "first\nlast\n"
    assert b"private" not in b"".join(file.read_bytes() for file in found.iterdir())


def test_payload_is_stored_when_asked_for_without_credentials(write):
    folder, _ = write(report_of(job_with()), with_payloads=True)
    [found] = list_bundles(folder)
    [request] = read_bundle(found)["requests"]
    assert (found / request["payload"]).read_bytes() == BODY
    assert request["headers"] == [["Content-Type", "application/json"], ["x-more", "1"]]
    assert "hidden" not in (found / "bundle.json").read_text()


def test_only_the_owner_may_read(write):
    folder, _ = write(report_of(job_with()), with_payloads=True)
    [found] = list_bundles(folder)
    assert [path.stat().st_mode & 0o777 for path in (folder, found)] == [0o700, 0o700]
    assert {file.stat().st_mode & 0o777 for file in found.iterdir()} == {0o600}


def test_newest_bundles_are_kept(write):
    folder, paths = write(*[report_of(at=1000.0 + i) for i in range(5)], num_kept=3)
    assert [str(path) for path in list_bundles(folder)] == [*reversed(paths[2:])]


def test_no_bundle_is_written_if_none_is_kept(write):
    folder, paths = write(report_of(), num_kept=0)
    assert paths == [""]
    assert not folder.exists()


def test_folder_of_another_kind_is_a_warning(write, tmp_path, caplog):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "crashes").write_text("a file")
    write(report_of())
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_requests_beyond_the_limit_have_no_fingerprint(write, monkeypatch):
    monkeypatch.setattr(crash_bundles, "MAX_READ_BYTES", 30)
    folder, _ = write(report_of(job_with(), job_with()), with_payloads=True)
    first, second = read_bundle(list_bundles(folder)[0])["requests"]
    assert first["payload"]
    assert (second["sha256"], second["payload"], second["sizeInBytes"]) == (None, None, len(BODY))


def test_credentials_in_the_configuration_are_masked(write):
    folder, _ = write(report_of(config={"hf_token": "abc", "nested": [{"apiKey": "def"}], "max_tokens": 5}))
    config = read_bundle(list_bundles(folder)[0])["model"]["config"]
    assert config == {"hf_token": "********", "nested": [{"apiKey": "********"}], "max_tokens": 5}


@pytest.mark.parametrize(
    ("death", "kind"),
    [
        (WorkerExit(reason="", is_hung=True), "hang"),
        (WorkerExit(reason="", out_of_memory=True), "out of memory"),
        (WorkerExit(reason="", while_loading=True), "load failure"),
    ],
)
def test_kinds(death, kind):
    assert crash_bundles.kind_of(death) == kind


@pytest.mark.parametrize("content", [None, "{", "[]", json.dumps({"format": 99})])
def test_folder_that_is_no_bundle_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "bundle.json").write_text(content)
    with pytest.raises(ConfigError, match="crash bundle"):
        read_bundle(tmp_path)
