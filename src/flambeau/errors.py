"""Every exception that Flambeau raises on purpose.

    FlambeauError
    ├── ConfigError              a setting is missing, misspelled or out of range
    │   └── CannotListen         a port is taken or not permitted
    ├── ArchiveError
    │   ├── BrokenArchive        the archive is unreadable: truncated, not a zip, no manifest
    │   ├── MissingFile          a file to pack does not exist
    │   ├── UnsafeArchive        unpacking would write outside of its folder or exceed its limits
    │   ├── DownloadFailed       the archive could not be downloaded
    │   └── DependenciesFailed   its requirements could not be installed
    ├── BadRequest               the request is invalid
    │   ├── BodyTooLarge         its body is larger than the server takes
    │   ├── InvalidField         one field is invalid, and is named
    │   ├── RequestQuarantined   it has ended several workers
    │   └── UnsupportedEncoding  its body is compressed in a way that is not supported
    ├── IdempotencyKeyReused     the Idempotency-Key belongs to another request
    ├── RequestRepeated          the same request runs, or has run, and its reply cannot be sent again
    ├── NotAllowed               the configuration does not allow this call
    ├── InvalidKey               the key is missing, wrong or expired
    ├── ModelNotFound
    │   └── VersionNotFound
    ├── ObjectNotFound           a file, a batch or another thing that a client has made does not exist
    ├── ModelExists              this name and version are registered already
    ├── ModelRemoved             it was unregistered while another call used it
    ├── FileTaken                a download would overwrite a file in the store
    ├── DefaultVersionInUse      the default version cannot be removed while others remain
    ├── Unavailable              no worker, or no room in the queue; try again later
    │   ├── QueueFull
    │   └── KeyLimitReached      the key has used what it may
    ├── ModelNotAllowed          the key is not for this model
    ├── DeadlinePassed           the job timed out
    ├── WorkersFailed            the workers of a model could not start
    ├── PlacementFailed          a worker needs more devices than the host has
    ├── WorkflowNotFound
    ├── WorkflowExists
    ├── BrokenWorkflow           its archive, manifest or specification is unreadable
    ├── InvalidGraph             its nodes do not form a valid graph
    ├── WorkflowFailed           a node of a workflow could not be started
    ├── NodeFailed               a node of a workflow failed
    ├── JobFailed                the handler answered with an error
    │   └── InvalidInput         the worker rejected the request itself
    ├── WorkerDied               the worker exited before it answered
    ├── HandlerError             the handler could not be found, loaded or called
    │   └── MissingPackages      a package that it needs is not installed
    ├── ClientError              raised by the Python client
    │   ├── ApiError             the server answered with an error
    │   ├── NoConnection         no server answers, or it closed the connection before it answered
    │   └── CallTimedOut         the answer took longer than the client waits
    ├── ServerNotStarted         a server started from Python has exited, or a model of it could not be loaded
    └── PredictionException      raised by a handler to answer with its own status and text

No class here depends on HTTP or gRPC; each frontend has one table of statuses. `is_final` means that a retry would fail
the same way: a worker that cannot load its model for such a reason is not restarted.

"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable

MAX_COMPARED_CHARACTERS = 100  # comparing is quadratic, and names come from clients


class FlambeauError(Exception):
    """Base of all errors raised on purpose; the text is written for users, `cause` has what it leaves out."""

    is_final = False
    plain = ""  # the text in our own words, where existing clients match another

    def __init__(self, message: str = "", *, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause

    @property
    def reason(self) -> str:
        """The cause in one line; empty if the text itself says it, or nothing is known."""
        return self.cause.partition("\n")[0]

    @property
    def with_reason(self) -> str:
        """The text and the cause in one line."""
        text, reason = str(self), self.reason
        return text if not reason or reason in text else f"{text.rstrip('. ')}: {reason}"


class ConfigError(FlambeauError):
    """A setting is missing, misspelled or out of range."""

    is_final = True


class CannotListen(ConfigError):
    """A listener could not be opened at `address`."""

    def __init__(self, address: str, message: str) -> None:
        super().__init__(message)
        self.address = address


class ArchiveError(FlambeauError):
    pass


class BrokenArchive(ArchiveError):
    """The archive is unreadable; `cause` has details where the text is fixed."""

    is_final = True


class MissingFile(ArchiveError, FileNotFoundError):
    """A file to pack does not exist."""


class UnsafeArchive(ArchiveError):
    """Unpacking would write outside of the target folder or exceed its limits."""


class DownloadFailed(ArchiveError):
    """The archive could not be downloaded; `cause` has the reason."""

    def __init__(self, url: str, *, cause: str = "") -> None:
        super().__init__(f"Failed to download archive from: {url}", cause=cause)


class DependenciesFailed(ArchiveError):
    """A model's requirements could not be installed; `cause` has the installer's last lines."""

    @property
    def reason(self) -> str:
        lines = self.cause.splitlines()
        return next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "")


class BadRequest(FlambeauError):
    """The request is invalid."""


class BodyTooLarge(BadRequest):
    """The body is larger than the server takes."""


class UnsupportedEncoding(BadRequest):
    """The body is compressed in a way that is not supported."""


class InvalidField(BadRequest):
    """A field is missing, unknown or out of range; `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class RequestQuarantined(BadRequest):
    """The same request has ended several workers; `cause` has how the last one exited."""

    def __init__(self, model: str, num_crashes: int, minutes: float, *, cause: str) -> None:
        super().__init__(
            f"This request has ended {num_crashes} workers of model {model!r}. It is refused until {minutes:g} minutes "
            "after the last time (quarantineAfterCrashes)",
            cause=cause,
        )


class IdempotencyKeyReused(FlambeauError):
    """The Idempotency-Key belongs to another request."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"The Idempotency-Key {key!r} was sent with another request: its path or body differs. A key is for one "
            "request and its repetitions; send a new one."
        )


class RequestRepeated(FlambeauError):
    """The same request runs, or has run, and its reply cannot be sent again."""


class NotAllowed(FlambeauError):
    """The configuration does not allow this call."""


class InvalidKey(FlambeauError):
    """The key is missing, wrong or expired."""

    def __init__(self, message: str, *, plain: str = "") -> None:
        super().__init__(message)
        self.plain = plain


class ForeignRequest(FlambeauError):
    """The request came through a web page of another site, or names the server as only such a page would."""


class ModelNotFound(FlambeauError):
    """No model of that name, or nothing at that location; `cause` has the remedy, if there is one.

    `similar` finds the name that was meant. It is called for the text only, since callers may try several names.
    """

    def __init__(self, message: str, *, cause: str = "", similar: Callable[[], str | None] = lambda: None) -> None:
        super().__init__(message, cause=cause)
        self._similar = similar

    def __str__(self) -> str:
        near = self._similar()
        return super().__str__() + (f"; did you mean {near}?" if near else "")


class VersionNotFound(ModelNotFound):
    """The model exists, but not this version."""


class ModelExists(FlambeauError):
    """This name and version are registered already."""

    def __init__(self, name: str, version: str) -> None:
        super().__init__(f"Model version {version} is already registered for model {name}")


class ModelRemoved(FlambeauError):
    """The model was unregistered while another call started its workers."""

    def __init__(self, name: str) -> None:
        super().__init__(f'Model "{name}" has been unregistered.')


class FileTaken(FlambeauError):
    """A download would overwrite a file in the store."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Model file already exists {name}")


class DefaultVersionInUse(FlambeauError):
    """The default version cannot be removed while other versions remain."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Cannot remove default version for model {name}")


class Unavailable(FlambeauError):
    """No worker can take the job now."""

    def __init__(self, message: str, *, retry_after_s: int | None = None, plain: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.plain = plain


class QueueFull(Unavailable):
    """The queue of the model is full."""


class ObjectNotFound(FlambeauError):
    """A file, a batch or another thing that a client has made does not exist."""


class KeyLimitReached(Unavailable):
    """A key has reached one of its limits."""


class ModelNotAllowed(FlambeauError):
    """A key may not use a model."""


class DeadlinePassed(FlambeauError):
    """The job timed out."""


class WorkersFailed(FlambeauError):
    """The workers of a model could not start; `cause` has the reason."""

    def __init__(self, message: str, *, cause: str = "", out_of_memory: bool = False, is_final: bool = False) -> None:
        super().__init__(message, cause=cause)
        self.out_of_memory = out_of_memory
        self.is_final = is_final


class PlacementFailed(FlambeauError):
    """A worker needs more devices than the host has."""


class WorkflowNotFound(FlambeauError):
    """No workflow of that name, or nothing at that location."""


class WorkflowExists(FlambeauError):
    """This workflow is registered already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Workflow {name} is already registered.")


class BrokenWorkflow(FlambeauError):
    """A workflow's archive, manifest or specification is unreadable; `cause` has the place."""


class InvalidGraph(FlambeauError):
    """A workflow's nodes do not form a valid graph; `cause` names them."""


class WorkflowFailed(FlambeauError):
    """A node of a workflow could not be started; `cause` has the reason."""


class NodeFailed(FlambeauError):
    """A node of a workflow failed; `cause` has the reason."""

    def __init__(self, node: str, *, cause: str = "") -> None:
        super().__init__(f"Error executing {node}", cause=cause)


class JobFailed(FlambeauError):
    """The handler answered with an error; `status` is the handler API's code."""

    def __init__(self, message: str, *, status: int = 503, cause: str = "", reason: str = "") -> None:
        super().__init__(message, cause=cause)
        self.status = status
        self._reason = reason

    @property
    def reason(self) -> str:
        return self._reason


class InvalidInput(JobFailed):
    """The worker rejected the request: its form, its JSON or a value is invalid; `field` names it if it is known."""

    field = ""


class ReplyNotRead(JobFailed):
    """The client does not read its reply, which is cut."""

    def __init__(self) -> None:
        super().__init__("The client stopped reading; its call is ended.", status=429)


class WorkerDied(FlambeauError):
    """The worker exited before it answered; `cause` has the reason."""

    def __init__(self, *, cause: str, out_of_memory: bool = False) -> None:
        super().__init__("Worker died.", cause=cause)
        self.out_of_memory = out_of_memory


class HandlerError(FlambeauError, ValueError):
    """The handler could not be found, loaded or called."""

    def __init__(self, message: str = "", *, is_final: bool = True) -> None:
        super().__init__(message)
        self.is_final = is_final


class MissingPackages(HandlerError):
    """A package that a built-in handler needs is not installed."""


class PredictionException(FlambeauError):
    """Raised by a handler to answer the whole batch with its own status and text."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


GZIPPED = "it looks like gzip, which needs the header content-encoding: gzip"


def json_problem(error: Exception) -> str:
    """What is wrong with a text that `json.loads` rejects, and where."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        text = f"byte {error.start + 1} is not valid {error.encoding.upper()}"
        return f"{text}; {GZIPPED}" if error.object.startswith(b"\x1f\x8b") else text
    if isinstance(error, json.JSONDecodeError):
        if not error.doc.strip():
            return "it is empty"
        return f"{error.msg} (line {error.lineno}, column {error.colno})"
    return str(error)


def explain_json(raw: bytes | bytearray | str) -> str:
    """What is wrong with a text that is not JSON, and where."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return json_problem(error)
    encoding = "utf-8" if isinstance(raw, str) else json.detect_encoding(raw)
    if encoding == "utf-8-sig":
        return "it begins with a byte order mark; leave it out"
    if encoding != "utf-8":
        return f"it is {encoding.upper()}; send UTF-8"
    if holds_lone_surrogate(value):
        return "one of its texts holds half of a surrogate pair, which is no character"
    return "it holds a value that JSON does not have"  # such as NaN


def holds_lone_surrogate(value: object) -> bool:
    """Whether a text within a value of JSON cannot be encoded, such as that of `"\\ud800"`."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except RecursionError:
        return False
    return False


def suggest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name most similar to `name`; None if no similarity (0 to 1) reaches `cutoff`."""
    if len(name) > MAX_COMPARED_CHARACTERS:
        return None
    plain = name.lower().replace("-", "_")
    return next(iter(difflib.get_close_matches(plain, known, 1, cutoff=cutoff)), None)


def brief_cause(cause: str) -> str:
    """One line of a cause: the exception at the end of a traceback, or how a worker exited."""
    lines = [line.strip() for line in cause.splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[-1] if any(line.startswith("Traceback (") for line in lines) else lines[0]


# ---- of the Python client ----


class ClientError(FlambeauError):
    """A call of the Python client failed."""


class ApiError(ClientError):
    """The server answered with an error; its text ends with the cause in one line."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        kind: str = "",
        cause: str = "",
        request_id: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        text = f"{message} (HTTP {status})"
        if told := brief_cause(cause):
            text = f"{text}: {told}"
        super().__init__(text, cause=cause)  # a traceback, or how a worker exited, if the server shows details
        self.message = message
        self.status = status
        self.kind = kind  # the class of the error, as the server names it
        self.request_id = request_id  # of the server's log
        self.retry_after_s = retry_after_s


class NoConnection(ClientError):
    """No server answers, or it closed the connection before the end of its answer."""


class CallTimedOut(ClientError):
    """The answer, or the next part of it, took longer than the client waits."""


class ServerNotStarted(FlambeauError):
    """A server that was started from Python has exited, or a model of it could not be loaded."""

    def __init__(self, message: str, *, cause: str = "") -> None:
        super().__init__(f"{message}\n{cause}" if cause else message, cause=cause)  # last lines of server or worker
