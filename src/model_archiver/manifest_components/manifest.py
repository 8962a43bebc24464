"""What scripts import from `model_archiver.manifest_components.manifest`."""

from flambeau.torchserve.model_archiver import RuntimeType as RuntimeType
