"""What scripts import from `workflow_archiver.workflow_archiver_error`."""

from flambeau.torchserve.workflow_archiver import WorkflowArchiverError as WorkflowArchiverError
