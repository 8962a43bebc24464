"""What scripts import from `workflow_archiver.manifest_components.manifest`."""

from __future__ import annotations

import json
from typing import Any

from workflow_archiver.manifest_components.workflow import Workflow


class Manifest:
    """The manifest of an archive; its text is what is written."""

    def __init__(self, workflow: Workflow) -> None:
        self.workflow = workflow
        self.manifest_dict: dict[str, Any] = workflow.described.to_dict()

    def __str__(self) -> str:
        return json.dumps(self.manifest_dict, indent=2)

    __repr__ = __str__
