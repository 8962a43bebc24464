"""The failure of a load, and whether it is final."""

from __future__ import annotations

import errno
import sys

import pytest

from flambeau.errors import BadRequest, ConfigError, HandlerError, InvalidField
from flambeau.file_import import import_file
from flambeau.frontend.http.errors import openai_error
from flambeau.llm.errors import CheckpointError, InvalidRequest, LLMError, NoRoom, TokenizerError
from flambeau.serving.workers.remote_worker import to_error
from flambeau.worker.failures import load_failed, to_failed
from flambeau.worker.results import BadResult


class OwnError(Exception):
    """A handler's own, which knows that it cannot heal."""

    is_final = True


def raised(error):
    try:
        raise error
    except Exception as caught:
        return load_failed(caught)


@pytest.mark.parametrize(
    "error", [HandlerError, ConfigError, LLMError, CheckpointError, TokenizerError, InvalidRequest, OwnError]
)
def test_final_error_is_reported_in_one_line(error):
    failed = raised(error("there is no tokenizer:\n\tput one there"))
    assert failed.is_final
    assert failed.message == "there is no tokenizer: put one there"
    assert "Traceback" in failed.detail


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("not now"), "ValueError: not now"),
        (NoRoom("no memory is left"), "flambeau.llm.errors.NoRoom: no memory is left"),
        (HandlerError("no network", is_final=False), "flambeau.errors.HandlerError: no network"),
        (HandlerError("CUDA error: out of memory"), "flambeau.errors.HandlerError: CUDA error: out of memory"),
        (HandlerError(""), "flambeau.errors.HandlerError"),
    ],
)
def test_other_errors_are_not_final(error, message):
    failed = raised(error)
    assert not failed.is_final
    assert failed.message.startswith(message)
    assert "(test_failures.py:" in failed.message


def wrapped(cause, *, is_hidden=False):
    try:
        raise cause
    except Exception as error:
        try:
            raise HandlerError("model.pt could not be loaded") from (None if is_hidden else error)
        except HandlerError as outer:
            return load_failed(outer)


NO_MEMORY = "unable to mmap 8 bytes from file <model.pt>: Cannot allocate memory (12)"


@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (MemoryError(), 507),
        (RuntimeError(NO_MEMORY), 507),
        (RuntimeError("CUDA error: out of memory"), 507),
        (RuntimeError("hip: Out of memory"), 507),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 507),
        (OSError(errno.EIO, "Input/output error"), 500),
        (OSError(errno.EMFILE, "Too many open files"), 500),
        (TimeoutError("the share did not answer"), 500),
    ],
)
def test_error_is_not_final_if_a_cause_may_pass(cause, status, is_hidden):
    failed = wrapped(cause, is_hidden=is_hidden)
    assert not failed.is_final
    assert failed.status == status


@pytest.mark.parametrize(
    "cause",
    [
        FileNotFoundError(errno.ENOENT, "No such file"),
        PermissionError(errno.EACCES, "Permission denied"),
        IsADirectoryError(errno.EISDIR, "Is a directory"),
        NotADirectoryError(errno.ENOTDIR, "Not a directory"),
        OSError(errno.EINVAL, "Invalid argument"),  # what a file that was cut off leads to
        RuntimeError("size mismatch"),
    ],
)
def test_error_is_final_if_its_causes_stay(cause):
    failed = wrapped(cause)
    assert failed.is_final
    assert failed.status == 500


def test_deep_and_circular_causes_are_followed():
    inner, outer = MemoryError(), HandlerError("no model")
    outer.__cause__ = ValueError("no weights")
    outer.__cause__.__cause__ = inner
    inner.__cause__ = outer
    assert not load_failed(outer).is_final
    outer.__cause__ = outer
    assert load_failed(outer).is_final


def test_nothing_is_final_where_files_are_watched():
    assert not load_failed(HandlerError("no class"), may_change=True).is_final


def imported(source, folder):
    """The failure of a handler with this source."""
    file = folder / "mine_for_failures.py"
    file.write_text(source)
    sys.path.insert(0, str(folder))
    try:
        import_file(file)
    except Exception as error:
        return load_failed(error, folder=str(folder))
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("mine_for_failures", None)
        sys.modules.pop("beside_for_failures", None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def handle(:\n", "SyntaxError: invalid syntax (mine_for_failures.py:1, column 12), in `def handle(:`"),
        ("def handle():\npass\n", "IndentationError: expected an indented block after function definition"),
        (
            "from beside_for_failures import nothing\n",
            "ImportError: beside_for_failures.py has no 'nothing' (",
        ),
    ],
)
def test_code_that_cannot_be_imported_is_not_tried_again(tmp_path, source, message):
    (tmp_path / "beside_for_failures.py").write_text("")
    failed = imported(source, tmp_path)
    assert failed.is_final
    assert failed.message.startswith(message)


def test_module_that_is_not_installed_is_final_and_has_the_line_to_install_it(tmp_path):
    failed = imported("import a_module_that_nobody_has\n", tmp_path)
    assert (failed.is_final, failed.needs_install) == (True, True)
    assert "pip install a_module_that_nobody_has" in failed.message


@pytest.mark.parametrize(
    "source",
    [
        "from os import nothing_like_that\n",
        "eval('1 +')\n",  # of data, not of the handler
    ],
)
def test_other_import_errors_are_tried_again(tmp_path, source):
    assert not imported(source, tmp_path).is_final


def test_syntax_error_in_files_that_may_change_is_tried_again(tmp_path):
    error = SyntaxError("invalid syntax")
    error.filename = __file__
    assert load_failed(error).is_final
    assert not load_failed(error, may_change=True).is_final


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), 507),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), 507),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), 507),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), 507),
        (RuntimeError("CUDA error: device-side assert triggered"), 503),
        (AssertionError("Torch not compiled with CUDA enabled"), 503),
        (RuntimeError("No CUDA GPUs are available"), 503),
        (ValueError("the shelf is out of memory sticks"), 503),
    ],
)
def test_only_a_lack_of_memory_is_507(error, status):
    assert to_failed([1], error).status == status


def test_sentence_precedes_the_traceback_and_survives_a_long_one():
    failed = to_failed([1], RuntimeError("No CUDA GPUs are available" + "\nx" * 20_000))
    assert failed.detail.startswith("RuntimeError: No CUDA GPUs are available")
    assert "this worker has none" in failed.detail.partition("\n")[0]


def test_result_is_explained_without_frames_of_the_server():
    error = BadResult("Invalid model predict output", "returned None, expected a list")
    error.place = "handle (handler.py:3)"
    failed = to_failed([1], error)
    assert (failed.status, failed.message) == (503, "Invalid model predict output")
    assert failed.detail == "handle (handler.py:3) returned None, expected a list"
    assert to_failed([1], BadResult("the status is wrong")).detail == "handle: the status is wrong"


def test_the_invalid_field_reaches_the_client():
    failed = to_failed([1], InvalidField("top_k", "top_k must be a whole number"))
    assert (failed.status, failed.field, failed.is_bad_request) == (400, "top_k", True)
    error = to_error(failed)
    assert openai_error(400, str(error), error)["param"] == "top_k"
    without = to_error(to_failed([1], BadRequest("the body is empty")))
    assert openai_error(400, str(without), without)["param"] is None
