"""What is said about a configuration before it is moved."""

from __future__ import annotations

import pytest

from flambeau.torchserve.doctor.configuration import check_config


@pytest.fixture
def said(tmp_path):
    def look(text):
        path = tmp_path / "config.properties"
        path.write_text(text)
        findings, _ = check_config(path, tmp_path)
        return [(finding.level, finding.text) for finding in findings]

    return look


@pytest.mark.parametrize(
    ("text", "level", "words"),
    [
        ("job_queue_sise=1", "note", "did you mean job_queue_size?"),
        ("vmargs=-Xmx4g", "note", "vmargs: this server does not run on Java"),
        ("job_queue_size=many", "problem", "job_queue_size"),
        ("load_models=a.mar,n=b.mar", "problem", "startup model b.mar"),
        ('model_snapshot={"models":{"a":{"1":{"marName":"a.mar"}}}}', "problem", "startup model a.mar"),
        ("model_snapshot={", "problem", "unreadable model_snapshot"),
        ("inference_address=http://0.0.0.0:8080", "note", "calls need a key from key_file.json"),
        ("", "note", "calls need a key from key_file.json"),
        (
            "management_address=http://0.0.0.0:8081\ndisable_token_authorization=true",
            "note",
            "allowed_urls is not set",
        ),
        ("", "note", "enable_model_api=true"),
        ("metrics_config=/nowhere.yaml", "problem", "there is no file /nowhere.yaml"),
        ("keystore=/nowhere.p12\nkeystore_type=JKS", "problem", "JKS is not supported"),
        ("workflow_store=/nowhere", "note", "/nowhere is not a folder"),
        ("job_queue_size=many\nmax_request_size=huge", "problem", "max_request_size"),
    ],
)
def test_problems_and_differences_are_named(said, text, level, words):
    assert [one for one in said(text) if one[0] == level and words in one[1]], said(text)


def test_urls_and_all_are_not_looked_for_in_the_store(said):
    assert not [one for one in said("load_models=all") + said("load_models=x=https://h/x.mar") if one[0] == "problem"]


def test_settings_that_mean_the_same_are_fine(said):
    text = (
        "disable_token_authorization=true\nallowed_urls=https://h/.*\ndefault_workers_per_model=2\n"
        "enable_model_api=true"
    )
    assert said(text) == [("ok", "4 settings, all understood")]


def test_file_that_is_not_there(tmp_path):
    findings, _ = check_config(tmp_path / "none", tmp_path)
    assert findings[0].level == "problem"
