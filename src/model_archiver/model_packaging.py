"""`torch-model-archiver`, and what scripts import from `model_archiver.model_packaging`."""

from __future__ import annotations

import logging

from flambeau.errors import ArchiveError, MissingFile
from model_archiver.arg_parser import ArgParser
from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_archiver_error import ModelArchiverError
from model_archiver.model_packaging_utils import ModelExportUtils


def package_model(config: ModelArchiverConfig, manifest: str) -> None:
    """Pack a model with this manifest; a mistake is logged and raised."""
    try:
        ModelExportUtils.validate_inputs(config.model_name, config.export_path)
        export_path = ModelExportUtils.check_mar_already_exists(
            config.model_name, config.export_path, config.force, config.archive_format
        )
        ModelExportUtils.archive(export_path, config.model_name, config, manifest, config.archive_format)
        logging.info("Successfully exported model %s to file %s", config.model_name, export_path)
    except (ModelArchiverError, MissingFile) as error:
        logging.error(error)
        raise
    except ArchiveError as error:
        logging.error(error)
        raise ModelArchiverError(str(error)) from error


def generate_model_archive(config: ModelArchiverConfig | None = None) -> None:
    """Pack what a configuration asks for, or else the command line."""
    logging.basicConfig(format="%(levelname)s - %(message)s")
    config = config or ArgParser.export_model_args_parser()
    package_model(config, manifest=ModelExportUtils.generate_manifest_json(config))


if __name__ == "__main__":
    generate_model_archive()
