"""What scripts import from `workflow_archiver.manifest_components.workflow`."""

from __future__ import annotations

from pathlib import Path

from flambeau.torchserve.workflows.archive_file import WorkflowManifest


class Workflow:
    """What a manifest says of a workflow: base names only."""

    def __init__(self, workflow_name: str, spec_file: str, handler: str | None = None) -> None:
        self.described = WorkflowManifest(
            name=workflow_name, spec_file=Path(spec_file).name, handler=Path(handler).name if handler else ""
        )
        self.workflow_name = self.described.name
        self.spec_file = self.described.spec_file
        self.handler = self.described.handler
