"""What scripts import from `model_archiver.manifest_components.manifest`."""

from flambeau.torchserve.model_archiver import ModelArchiveManifest
from flambeau.torchserve.model_archiver import RuntimeType as RuntimeType

Manifest = ModelArchiveManifest
