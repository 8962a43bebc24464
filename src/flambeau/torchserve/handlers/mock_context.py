"""MockContext and files for the tests of handlers, without a server."""

from __future__ import annotations

import shutil
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch

from flambeau.config.model import read_options
from flambeau.torchserve.metrics.store import MetricsStore


class MockContext:
    """A context to initialize a handler with; `explain` sets the kind of request."""

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
            read_options(Path(model_dir) / model_yaml_config_file) if model_yaml_config_file else {}
        )

    def get_request_header(self, idx: int, exp: str) -> bool:
        # TorchServe's own tests rely on a False for the first request.
        return bool(idx and exp and self.explain)

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        return {"explain": "True"} if self.explain else {}


def download_model(model_url: str, model_dir: Path) -> None:
    """Download weights as `model.pt`; a copy is cached in the home folder."""
    cached = Path.home() / ".cache" / "flambeau" / "test-models" / Path(urlparse(model_url).path).name
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial, _ = urllib.request.urlretrieve(model_url)
        shutil.move(partial, cached)
    shutil.copy(cached, model_dir / "model.pt")


def copy_files(src_dir: Path, dst_dir: Path, files: Mapping[str, str]) -> None:
    """Copy files to a folder; `files` maps each name to the new one."""
    for source, name in files.items():
        shutil.copyfile(src_dir / source, dst_dir / name)
