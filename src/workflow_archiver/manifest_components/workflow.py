"""What scripts import from `workflow_archiver.manifest_components.workflow`."""

from __future__ import annotations

from pathlib import Path

from flambeau.archive.workflow import WorkflowRecipe, to_workflow_manifest


class Workflow:
    """What a manifest says of a workflow: base names only."""

    def __init__(self, workflow_name: str, spec_file: str, handler: str | None = None) -> None:
        recipe = WorkflowRecipe(
            workflow_name=workflow_name, spec_file=Path(spec_file), handler=Path(handler) if handler else None
        )
        self.described = to_workflow_manifest(recipe)
        self.workflow_name = self.described.name
        self.spec_file = self.described.spec_file
        self.handler = self.described.handler
