"""What scripts import from `workflow_archiver.manifest_components.manifest`."""
