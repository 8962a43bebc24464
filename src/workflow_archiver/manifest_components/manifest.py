"""What scripts import from `workflow_archiver.manifest_components.manifest`."""

from flambeau.torchserve.workflow_archiver import WorkflowArchiveManifest

Manifest = WorkflowArchiveManifest
