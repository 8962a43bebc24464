"""Error → status."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from flambeau.config.server import ErrorStyle
from flambeau.errors import (
    BadRequest,
    BrokenArchive,
    ConfigError,
    DeadlinePassed,
    DefaultVersionInUse,
    DownloadFailed,
    FileTaken,
    InvalidKey,
    JobFailed,
    KeyLimitReached,
    ModelExists,
    ModelNotAllowed,
    ModelNotFound,
    NotAllowed,
    Unavailable,
    VersionNotFound,
    WorkerDied,
    WorkersFailed,
)
from flambeau.frontend.grpc.messages import MalformedMessage
from flambeau.frontend.grpc.status import (
    code_of_http,
    details_of,
    of_management,
    of_open_inference,
    of_prediction,
)


@pytest.mark.parametrize(
    ("error", "code", "name"),
    [
        (ModelNotFound("x"), StatusCode.NOT_FOUND, "org.pytorch.serve.archive.model.ModelNotFoundException"),
        (VersionNotFound("x"), StatusCode.NOT_FOUND, "org.pytorch.serve.archive.model.ModelVersionNotFoundException"),
        (BadRequest("x"), StatusCode.INVALID_ARGUMENT, "org.pytorch.serve.http.BadRequestException"),
        (ConfigError("x"), StatusCode.INVALID_ARGUMENT, "org.pytorch.serve.archive.model.InvalidModelException"),
        (BrokenArchive("x"), StatusCode.INVALID_ARGUMENT, "org.pytorch.serve.archive.model.InvalidModelException"),
        (DownloadFailed("x"), StatusCode.INVALID_ARGUMENT, "org.pytorch.serve.archive.DownloadArchiveException"),
        (WorkersFailed("x"), StatusCode.INTERNAL, "org.pytorch.serve.http.InternalServerException"),
        (FileTaken("x"), StatusCode.INTERNAL, "org.pytorch.serve.http.InternalServerException"),
        (ModelExists("m", "1"), StatusCode.ALREADY_EXISTS, "org.pytorch.serve.http.ConflictStatusException"),
        (
            DefaultVersionInUse("m"),
            StatusCode.FAILED_PRECONDITION,
            "org.pytorch.serve.http.InvalidModelVersionException",
        ),
        (DeadlinePassed("x"), StatusCode.DEADLINE_EXCEEDED, "org.pytorch.serve.http.RequestTimeoutException"),
    ],
)
def test_management(error, code, name):
    assert of_management(error) == (code, name)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelNotFound("x"), StatusCode.INTERNAL),
        (VersionNotFound("x"), StatusCode.INTERNAL),
        (BadRequest("x"), StatusCode.INTERNAL),
        (Unavailable("x"), StatusCode.INTERNAL),
        (MalformedMessage("x"), StatusCode.INVALID_ARGUMENT),
        (DeadlinePassed("x"), StatusCode.DEADLINE_EXCEEDED),
        (InvalidKey("x"), StatusCode.PERMISSION_DENIED),
        (JobFailed("x", status=503), StatusCode.UNAVAILABLE),
        (JobFailed("x", status=507), StatusCode.INTERNAL),
        (WorkerDied(cause=""), StatusCode.INTERNAL),
        (WorkerDied(cause="", out_of_memory=True), StatusCode.INTERNAL),
    ],
)
def test_prediction(error, code):
    assert of_prediction(error)[0] is code
    if type(error) is ModelNotFound:
        assert of_open_inference(error)[0] is StatusCode.NOT_FOUND
    elif type(error) is not VersionNotFound:
        assert of_open_inference(error) == of_prediction(error)


def test_every_http_status_has_a_code():
    assert {code_of_http(status) for status in range(400, 500)} == {
        StatusCode.INVALID_ARGUMENT,
        StatusCode.UNAUTHENTICATED,
        StatusCode.PERMISSION_DENIED,
        StatusCode.NOT_FOUND,
        StatusCode.DEADLINE_EXCEEDED,
        StatusCode.ABORTED,
        StatusCode.RESOURCE_EXHAUSTED,
        StatusCode.OUT_OF_RANGE,
        StatusCode.CANCELLED,
        StatusCode.FAILED_PRECONDITION,
    }
    assert code_of_http(302) is StatusCode.UNKNOWN
    assert code_of_http(599) is StatusCode.INTERNAL


def test_details_are_the_message_and_the_class_but_refusals_have_none():
    assert details_of(BadRequest("what"), "Name") == "what\nName"
    failed = JobFailed("Prediction failed", reason="KeyError: 'a' (mine.py:3)")
    assert details_of(failed, "Name") == "Prediction failed\nName"
    plain = ErrorStyle(is_plain=True, has_details=True)
    assert details_of(failed, "Name", plain) == "Prediction failed: KeyError: 'a' (mine.py:3)\nName"
    assert details_of(InvalidKey("no"), "Name") == "no"
    assert details_of(NotAllowed("no"), "Name") == "no"
    long = details_of(BadRequest("é" * 5000), "Name")
    assert len(long.encode()) < 2100
    assert long.endswith("…\nName")


@pytest.mark.parametrize("statuses", [of_prediction, of_open_inference, of_management])
def test_limits_of_keys_have_codes_that_clients_handle(statuses):
    assert statuses(KeyLimitReached("slow down", retry_after_s=2))[0] is StatusCode.RESOURCE_EXHAUSTED
    assert statuses(ModelNotAllowed("not yours"))[0] is StatusCode.PERMISSION_DENIED
