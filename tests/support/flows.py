"""Workflow archives for tests."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import yaml

from support.running import HANDLERS

FUNCTIONS = HANDLERS / "flow_functions.py"


def pack_flow(
    store: Path,
    name: str,
    dag: Any,
    models: Any = None,
    *,
    handler: Path | None = FUNCTIONS,
    spec: str | None = None,
    manifest: Any = None,
) -> Path:
    """Write `<store>/<name>.war`; `spec` and `manifest` replace what would be written."""
    workflow = {"workflowName": name, "specFile": "spec.yaml", **({"handler": handler.name} if handler else {})}
    document = {"createdOn": "01/02/2024 03:04:05", "workflow": workflow, "archiverVersion": "0.2.15"}
    path = store / f"{name}.war"
    with zipfile.ZipFile(path, "w") as archive:
        text = yaml.safe_dump({"models": models or {}, "dag": dag}, sort_keys=False)
        archive.writestr("spec.yaml", text if spec is None else spec)
        if handler:
            archive.write(handler, handler.name)
        archive.writestr("WAR-INF/MANIFEST.json", json.dumps(document if manifest is None else manifest))
    return path
