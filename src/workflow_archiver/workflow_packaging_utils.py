"""What scripts import from `workflow_archiver.workflow_packaging_utils`."""

from flambeau.torchserve.workflow_archiver import WorkflowArchiverError as WorkflowArchiverError
from flambeau.torchserve.workflow_archiver import WorkflowExportUtils as WorkflowExportUtils
