"""What handlers' own tests import from `ts.torch_handler.unit_tests.test_utils.mock_context`."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import torch

from flambeau.torchserve.metrics.store import MetricsStore
from ts.utils.util import get_yaml_config


class MockContext:
    """A context to initialize a handler with, without a server; `explain` says what kind of request it has."""

    def __init__(
        self,
        model_pt_file: str | None = "model.pt",
        model_dir: str = "ts/torch_handler/unit_tests/models/tmp",
        model_file: str | None = "model.py",
        gpu_id: str | int | None = "0",
        model_name: str = "mnist",
        model_yaml_config_file: str | None = None,
    ) -> None:
        files = {"serializedFile": model_pt_file, "modelFile": model_file}
        self.manifest: dict[str, Any] = {"model": {key: name for key, name in files.items() if name}}
        self.system_properties: dict[str, Any] = {"model_dir": model_dir}
        if gpu_id and torch.cuda.is_available():
            self.system_properties["gpu_id"] = gpu_id
        self.explain = False
        self.metrics = MetricsStore({0: str(uuid.uuid4())}, model_name)
        self.model_yaml_config = (
            get_yaml_config(Path(model_dir) / model_yaml_config_file) if model_yaml_config_file else {}
        )

    def get_request_header(self, idx: int, exp: str) -> bool:
        """Whether this is an explanation, for any request but the first, which TorchServe's own tests rely on."""
        return bool(idx and exp and self.explain)
