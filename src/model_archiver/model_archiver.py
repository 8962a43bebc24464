"""What scripts import from `model_archiver.model_archiver`."""

from __future__ import annotations

from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_packaging import generate_model_archive


class ModelArchiver:
    """The archiver as a Python API."""

    @staticmethod
    def generate_model_archive(config: ModelArchiverConfig) -> None:
        """Pack a model."""
        generate_model_archive(config)
