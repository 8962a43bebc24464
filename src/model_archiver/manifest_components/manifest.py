"""What scripts import from `model_archiver.manifest_components.manifest`."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from flambeau.archive.manifest import Manifest as ModelManifest


class RuntimeType(Enum):
    """What runs a handler."""

    PYTHON = "python"
    PYTHON3 = "python3"
    LSP = "LSP"


class Manifest:
    """The manifest of an archive; its text is what is written."""

    def __init__(self, runtime: str, model: ModelManifest) -> None:
        self.runtime = RuntimeType(runtime)
        self.model = model
        self.manifest_dict: dict[str, Any] = model.to_dict()

    def __str__(self) -> str:
        return json.dumps(self.manifest_dict, indent=2)

    __repr__ = __str__
