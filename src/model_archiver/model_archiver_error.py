"""What scripts import from `model_archiver.model_archiver_error`."""

from __future__ import annotations

from flambeau.errors import ArchiveError


class ModelArchiverError(ArchiveError):
    """A model cannot be packed in this way."""
