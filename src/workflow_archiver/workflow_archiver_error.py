"""What scripts import from `workflow_archiver.workflow_archiver_error`."""

from __future__ import annotations

from flambeau.errors import ArchiveError


class WorkflowArchiverError(ArchiveError):
    """A workflow cannot be packed in this way."""
