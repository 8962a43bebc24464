"""What scripts import from `workflow_archiver.manifest_components.workflow`."""

from flambeau.torchserve.workflow_archiver import WorkflowDescription

Workflow = WorkflowDescription
