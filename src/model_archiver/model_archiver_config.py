"""What scripts import from `model_archiver.model_archiver_config`."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass, fields

from flambeau.archive.pack import ArchiveFormat
from model_archiver.manifest_components.manifest import RuntimeType


@dataclass
class ModelArchiverConfig:
    """What goes into an archive, as the command line says it; `extra_files` is separated by commas."""

    model_name: str
    handler: str
    version: str
    serialized_file: str | None = None
    model_file: str | None = None
    extra_files: str | None = None
    runtime: str = RuntimeType.PYTHON.value
    export_path: str = os.getcwd()
    archive_format: ArchiveFormat = "default"
    force: bool = False
    requirements_file: str | None = None
    config_file: str | None = None

    @classmethod
    def from_args(cls, args: Namespace) -> ModelArchiverConfig:
        """The fields of this class, taken from parsed arguments."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})
