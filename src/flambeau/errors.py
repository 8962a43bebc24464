"""Every exception that Flambeau raises on purpose.

    FlambeauError
    ├── ConfigError              a setting is missing, misspelt or out of range
    │   └── CannotListen         a port is taken, or not ours to open
    ├── ArchiveError
    │   ├── BrokenArchive        it cannot be read: truncated, not a zip, not a manifest
    │   ├── MissingFile          a file that should go into it is not there
    │   ├── UnsafeArchive        it would write outside its folder, or grow without bound
    │   ├── DownloadFailed       it could not be fetched from its URL
    │   └── DependenciesFailed   what its requirements name could not be installed
    ├── BadRequest               the caller asked for something that makes no sense
    │   ├── NotJson              a body that should be JSON cannot be read as such
    │   └── InvalidField         one field of a request is the reason, and is named
    ├── NotAllowed               this server does not take such calls
    ├── InvalidKey               the caller's key is missing, wrong or expired
    ├── ModelNotFound
    │   └── VersionNotFound
    ├── ModelExists              that name and version are registered already
    ├── FileTaken                a download would overwrite a file in the store
    ├── DefaultVersionInUse      the default version cannot go while others remain
    ├── Unavailable              no worker, or no room in the queue; try again later
    │   └── QueueFull            too many wait already
    ├── DeadlinePassed           the job's time was over before it was answered
    ├── WorkersFailed            a model's workers could not start
    ├── PlacementFailed          a worker needs more devices than there are
    ├── WorkflowNotFound
    ├── WorkflowExists
    ├── BrokenWorkflow           its archive, manifest or specification cannot be read
    ├── InvalidGraph             its nodes make no graph that could be run
    ├── WorkflowFailed           a node of a workflow could not be started
    ├── NodeFailed               a node of a workflow did not answer
    ├── JobFailed                the handler answered with an error
    ├── WorkerDied               the worker that held the job ended before it answered
    ├── HandlerError             the handler could not be found, loaded or called
    └── PredictionException      raised by a handler to answer with a status and text of its own

No class here knows of HTTP or gRPC; each frontend has one table that does. An error whose `is_final` is true says that
trying again would end the same: a worker that could not load its model for such a reason is not started anew.
"""

from __future__ import annotations


class FlambeauError(Exception):
    """Base of every error raised on purpose; its text is written for the person who reads it."""

    is_final = False


class ConfigError(FlambeauError):
    """A setting is missing, misspelt or out of range."""

    is_final = True


class CannotListen(ConfigError):
    """A listener could not be opened at `address`."""

    def __init__(self, address: str, message: str) -> None:
        super().__init__(message)
        self.address = address


class ArchiveError(FlambeauError):
    """Something is wrong with an archive."""


class BrokenArchive(ArchiveError):
    """The archive cannot be read; `cause` says more where the text is fixed."""

    is_final = True

    def __init__(self, message: str, *, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


class MissingFile(ArchiveError, FileNotFoundError):
    """A file that should go into the archive is not there."""


class UnsafeArchive(ArchiveError):
    """Unpacking would write outside the target folder or exceed its limits."""


class DownloadFailed(ArchiveError):
    """The archive could not be fetched from its URL; `cause` says why."""

    def __init__(self, url: str, *, cause: str = "") -> None:
        super().__init__(f"Failed to download archive from: {url}")
        self.cause = cause


class DependenciesFailed(ArchiveError):
    """What a model's requirements name could not be installed; `cause` holds the installer's last lines."""

    def __init__(self, message: str, *, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


class BadRequest(FlambeauError):
    """The caller asked for something that makes no sense."""


class NotJson(BadRequest):
    """A body that should be JSON cannot be read as such."""


class InvalidField(BadRequest):
    """A field of a request is missing, unknown or out of range; `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class NotAllowed(FlambeauError):
    """This server does not take such calls, by its configuration."""


class InvalidKey(FlambeauError):
    """The caller's key is missing, wrong or expired."""


class ModelNotFound(FlambeauError):
    """No model of that name, or nothing at that place."""


class VersionNotFound(ModelNotFound):
    """The model exists, the version does not."""


class ModelExists(FlambeauError):
    """That name and version are registered already."""

    def __init__(self, name: str, version: str) -> None:
        super().__init__(f"Model version {version} is already registered for model {name}")


class FileTaken(FlambeauError):
    """A download would overwrite a file in the store."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Model file already exists {name}")


class DefaultVersionInUse(FlambeauError):
    """The default version cannot be removed while other versions remain."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Cannot remove default version for model {name}")


class Unavailable(FlambeauError):
    """Nobody can take this job now."""

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Unavailable):
    """Too many jobs wait already."""


class DeadlinePassed(FlambeauError):
    """The job's time was over before it was answered."""


class WorkersFailed(FlambeauError):
    """A model's workers could not start; `cause` says why."""

    def __init__(self, message: str, *, cause: str = "", out_of_memory: bool = False, is_final: bool = False) -> None:
        super().__init__(message)
        self.cause = cause
        self.out_of_memory = out_of_memory
        self.is_final = is_final


class PlacementFailed(FlambeauError):
    """A worker needs more devices than there are."""


class WorkflowNotFound(FlambeauError):
    """No workflow of that name, or nothing at that place."""


class WorkflowExists(FlambeauError):
    """That workflow is registered already."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Workflow {name} is already registered.")


class BrokenWorkflow(FlambeauError):
    """A workflow's archive, manifest or specification cannot be read; `cause` says where."""

    def __init__(self, message: str, *, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


class InvalidGraph(FlambeauError):
    """A workflow's nodes make no graph that could be run; `cause` says which."""

    def __init__(self, message: str, *, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


class WorkflowFailed(FlambeauError):
    """A node of a workflow could not be started; `cause` says why."""

    def __init__(self, message: str, *, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause


class NodeFailed(FlambeauError):
    """A node of a workflow did not answer; `cause` says why."""

    def __init__(self, node: str, *, cause: str = "") -> None:
        super().__init__(f"Error executing {node}")
        self.cause = cause


class JobFailed(FlambeauError):
    """The handler answered with an error; `status` is what TorchServe's handler API calls it."""

    def __init__(self, message: str, *, status: int = 503, cause: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.cause = cause


class WorkerDied(FlambeauError):
    """The worker that held the job ended before it answered; `cause` says how."""

    def __init__(self, *, cause: str, out_of_memory: bool = False) -> None:
        super().__init__("Worker died.")
        self.cause = cause
        self.out_of_memory = out_of_memory


class HandlerError(FlambeauError, ValueError):
    """The handler could not be found, loaded or called."""

    def __init__(self, message: str = "", *, is_final: bool = True) -> None:
        super().__init__(message)
        self.is_final = is_final


class PredictionException(FlambeauError):
    """Raised by a handler to answer the whole batch with a status and a text of its own."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"
