"""`torch-model-archiver`: its command line, its configuration and the steps of packing (`model_archiver`)."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from flambeau.archive.manifest import BUILT_IN, RUNTIMES, UNSUPPORTED, Manifest
from flambeau.archive.pack import (
    SUFFIXES,
    ArchiveFormat,
    Recipe,
    check_name,
    files_below,
    files_of,
    is_skipped,
    path_of,
    to_manifest,
    write,
)
from flambeau.errors import ArchiveError, MissingFile
from flambeau.torchserve import TORCHSERVE_VERSION

FILES = ("model_file", "serialized_file", "handler", "extra_files", "requirements_file", "config_file")

archiving_options = dict(SUFFIXES)
model_handlers = dict.fromkeys([*BUILT_IN, *UNSUPPORTED], "anything")


class ModelArchiverError(ArchiveError):
    """The model cannot be packed like this."""


class RuntimeType(Enum):
    PYTHON = "python"
    PYTHON3 = "python3"
    LSP = "LSP"


class ModelArchiveManifest:
    """The manifest of an archive; its text is what is written."""

    def __init__(self, runtime: str, model: Manifest) -> None:
        self.runtime = RuntimeType(runtime)
        self.model = model
        self.manifest_dict: dict[str, Any] = {**model.to_dict(), "archiverVersion": TORCHSERVE_VERSION}

    def __str__(self) -> str:
        return json.dumps(self.manifest_dict, indent=2)

    __repr__ = __str__


@dataclass
class ModelArchiverConfig:
    """The contents of an archive, in the words of the command line; `extra_files` is separated by commas."""

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
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})


class ModelArchiverArgParser:
    @staticmethod
    def export_model_args_parser() -> ModelArchiverConfig:
        """Read the command line of this process."""
        return ModelArchiverConfig.from_args(_parser().parse_args())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torch-model-archiver", description="Pack a model into an archive.")
    add = parser.add_argument
    add("--model-name", required=True, help="name of the model, and of the archive")
    add("--serialized-file", help="weights, TorchScript, ONNX or an exported program")
    add("--model-file", help="Python file with the one class of an eager model")
    add("--handler", required=True, help="a built-in handler, dir/foo.py or dir/foo.py:function")
    add("--extra-files", help="files, folders and patterns, separated by commas")
    add("--runtime", default="python", choices=RUNTIMES, help="what runs the handler (default: python)")
    add("--export-path", default=os.getcwd(), help="folder to write to, created if missing (default: this one)")
    add("--archive-format", default="default", choices=[*SUFFIXES], help="default and zip-store write NAME.mar, tgz "
        "NAME.tar.gz, no-archive a folder NAME")  # fmt: skip
    add("-f", "--force", action="store_true", help="replace an existing archive")
    add("-v", "--version", default="1.0", help="version of the model (default: 1.0)")
    add("-r", "--requirements-file", help="pip requirements of the handler")
    add("-c", "--config-file", help="model-config.yaml")
    return parser


class ExportUtils:
    """What packing a model and packing a workflow have in common."""

    _suffix: ClassVar[str]  # of archives, which do not belong in others

    @staticmethod
    def clean_temp_files(temp_files: Iterable[str]) -> None:
        for file in temp_files:
            os.remove(file)

    @staticmethod
    def make_dir(d: str) -> None:
        os.makedirs(d, exist_ok=True)

    @staticmethod
    def directory_filter(directory: str, unwanted_dirs: Iterable[str]) -> bool:
        """Whether a folder belongs in an archive."""
        return directory not in unwanted_dirs and not is_skipped(directory)

    @classmethod
    def file_filter(cls, current_file: str, files_to_exclude: Iterable[str]) -> bool:
        """Whether a file belongs in an archive."""
        unwanted = {*files_to_exclude, "MANIFEST.json"}
        return current_file not in unwanted and not current_file.endswith((".pyc", ".DS_Store", cls._suffix))


class ModelExportUtils(ExportUtils):
    """The steps of packing a model."""

    _suffix = ".mar"

    @staticmethod
    def get_archive_export_path(export_file_path: str, model_name: str, archive_format: ArchiveFormat) -> str:
        return os.path.join(export_file_path, model_name + SUFFIXES[archive_format])

    @staticmethod
    def check_mar_already_exists(
        model_name: str, export_file_path: str | None, overwrite: bool, archive_format: ArchiveFormat = "default"
    ) -> str:
        """Return the folder to write to; raise if the archive exists and may not be replaced."""
        folder = os.getcwd() if export_file_path is None else export_file_path
        target = ModelExportUtils.get_archive_export_path(folder, model_name, archive_format)
        if os.path.exists(target):
            if not overwrite:
                raise ModelArchiverError(
                    f"{target} already exists.\nUse --force to replace it, or choose another --export-path."
                )
            logging.warning("Overwriting %s ...", target)
        return folder

    @staticmethod
    def find_unique(files: Iterable[str], suffix: str) -> str | None:
        """The only file with a suffix, or None; raise if there are several."""
        found = [file for file in files if file.endswith(suffix)]
        if len(found) > 1:
            raise ModelArchiverError(f"there must be one {suffix} file, not {len(found)}: {', '.join(found)}")
        return found[0] if found else None

    @staticmethod
    def generate_model(modelcfg: ModelArchiverConfig) -> Manifest:
        return to_manifest(to_recipe(modelcfg))

    @staticmethod
    def generate_manifest_json(config: ModelArchiverConfig) -> str:
        return str(ModelArchiveManifest(runtime=config.runtime, model=to_manifest(to_recipe(config))))

    @staticmethod
    def copy_artifacts(model_name: str, runtime: str, **kwargs: str | None) -> str:
        """Link the files of an archive into a new temporary folder, which the caller removes.

        Links save a copy of the weights.
        """
        files = {name.replace("-", "_"): value for name, value in kwargs.items()}
        recipe = to_recipe(ModelArchiverConfig(model_name=model_name, version="", runtime=runtime, **files))  # type: ignore[arg-type]
        sources = files_of(recipe, last_wins=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{model_name}-"))
        for name, source in sources.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(source.resolve())
        return str(folder)

    @staticmethod
    def archive(
        export_file: str, model_name: str, model_path: str, manifest: str, archive_format: ArchiveFormat = "default"
    ) -> None:
        """Write the files of a folder and a manifest as an archive."""
        target = path_of(model_name, Path(export_file), archive_format)
        write(target, model_name, files_below(Path(model_path), target), manifest.encode(), archive_format)

    @staticmethod
    def check_model_name_regex_or_exit(model_name: str) -> None:
        """Raise for a name with invalid characters."""
        try:
            check_name(model_name)
        except ArchiveError as error:
            raise ModelArchiverError(str(error)) from None

    @staticmethod
    def validate_inputs(model_name: str, export_path: str) -> None:
        """Raise for an invalid name or an export path that is a file; a missing folder is created later."""
        ModelExportUtils.check_model_name_regex_or_exit(model_name)
        if os.path.exists(export_path) and not os.path.isdir(export_path):
            raise ModelArchiverError(f"Given export-path {export_path} is not a directory. Name a folder.")


def to_recipe(config: ModelArchiverConfig) -> Recipe:
    extra_files = getattr(config, "extra_files", None) or ""
    return Recipe(
        model_name=config.model_name,
        handler=config.handler,
        version=config.version or "",
        serialized_file=_path(config.serialized_file),
        model_file=_path(config.model_file),
        extra_files=[part.strip() for part in extra_files.split(",") if part.strip()],
        requirements_file=_path(config.requirements_file),
        config_file=_path(getattr(config, "config_file", None)),
        runtime=config.runtime,
    )


def _path(name: str | None) -> Path | None:
    return Path(name) if name else None


def package_model(config: ModelArchiverConfig, manifest: str) -> None:
    """Pack a model with this manifest; errors are logged and raised."""
    try:
        ModelExportUtils.validate_inputs(config.model_name, config.export_path)
        export_path = ModelExportUtils.check_mar_already_exists(
            config.model_name, config.export_path, config.force, config.archive_format
        )
        files = {name: getattr(config, name) for name in FILES}
        model_path = ModelExportUtils.copy_artifacts(config.model_name, config.runtime, **files)
        try:
            ModelExportUtils.archive(export_path, config.model_name, model_path, manifest, config.archive_format)
        finally:
            shutil.rmtree(model_path, ignore_errors=True)
        logging.info("Successfully exported model %s to file %s", config.model_name, export_path)
    except (ModelArchiverError, MissingFile) as error:
        logging.error(error)
        raise
    except ArchiveError as error:
        logging.error(error)
        raise ModelArchiverError(str(error)) from error


def generate_model_archive(config: ModelArchiverConfig | None = None) -> None:
    """Pack the model that `config` describes, or the command line."""
    logging.basicConfig(format="%(levelname)s - %(message)s")
    if config is not None:
        package_model(config, manifest=ModelExportUtils.generate_manifest_json(config))
        return
    config = ModelArchiverArgParser.export_model_args_parser()
    try:
        package_model(config, manifest=ModelExportUtils.generate_manifest_json(config))
    except (ModelArchiverError, MissingFile):  # logged
        sys.exit(1)


class ModelArchiver:
    """The archiver as a Python API."""

    @staticmethod
    def generate_model_archive(config: ModelArchiverConfig) -> None:
        generate_model_archive(config)
