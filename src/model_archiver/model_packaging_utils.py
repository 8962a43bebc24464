"""What scripts import from `model_archiver.model_packaging_utils`."""

from __future__ import annotations

import logging
import os
import tempfile
import zipfile  # noqa: F401  (TorchServe's tests patch `zipfile.ZipFile` by way of this module)
from collections.abc import Iterable
from pathlib import Path

from flambeau.archive.builtin_handlers import BUILT_IN, UNSUPPORTED
from flambeau.archive.manifest import Manifest as ModelManifest
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
from flambeau.errors import ArchiveError
from model_archiver.manifest_components.manifest import Manifest
from model_archiver.model_archiver_config import ModelArchiverConfig
from model_archiver.model_archiver_error import ModelArchiverError

archiving_options = dict(SUFFIXES)
model_handlers = dict.fromkeys([*BUILT_IN, *UNSUPPORTED], "anything")


class ModelExportUtils:
    """The steps of packing a model, one by one."""

    @staticmethod
    def get_archive_export_path(export_file_path: str, model_name: str, archive_format: ArchiveFormat) -> str:
        """Where the archive goes."""
        return os.path.join(export_file_path, model_name + SUFFIXES[archive_format])

    @staticmethod
    def check_mar_already_exists(
        model_name: str, export_file_path: str | None, overwrite: bool, archive_format: ArchiveFormat = "default"
    ) -> str:
        """The folder to write to; what is there already may be in the way."""
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
        """The one file with a suffix, if there is one."""
        found = [file for file in files if file.endswith(suffix)]
        if len(found) > 1:
            raise ModelArchiverError(f"there must be one {suffix} file, not {len(found)}: {', '.join(found)}")
        return found[0] if found else None

    @staticmethod
    def generate_model(modelcfg: ModelArchiverConfig) -> ModelManifest:
        """What the manifest says of the model."""
        return to_manifest(to_recipe(modelcfg))

    @staticmethod
    def generate_manifest_json(config: ModelArchiverConfig) -> str:
        """The manifest as it is written."""
        return str(Manifest(runtime=config.runtime, model=ModelExportUtils.generate_model(config)))

    @staticmethod
    def copy_artifacts(model_name: str, runtime: str, **kwargs: str | None) -> str:
        """Lay out the files of an archive in a new folder below the temporary one; the caller removes it.

        They are links: gigabytes of weights are not copied to be packed.
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
    def clean_temp_files(temp_files: Iterable[str]) -> None:
        """Remove files."""
        for file in temp_files:
            os.remove(file)

    @staticmethod
    def make_dir(d: str) -> None:
        """Make a folder, unless it is there."""
        os.makedirs(d, exist_ok=True)

    @staticmethod
    def directory_filter(directory: str, unwanted_dirs: Iterable[str]) -> bool:
        """Whether a folder goes into an archive."""
        return directory not in unwanted_dirs and not is_skipped(directory)

    @staticmethod
    def file_filter(current_file: str, files_to_exclude: Iterable[str]) -> bool:
        """Whether a file is none of those that nobody wants."""
        unwanted = {*files_to_exclude, "MANIFEST.json"}
        return current_file not in unwanted and not current_file.endswith((".pyc", ".DS_Store", ".mar"))

    @staticmethod
    def check_model_name_regex_or_exit(model_name: str) -> None:
        """Refuse a name with characters that are not allowed."""
        try:
            check_name(model_name)
        except ArchiveError as error:
            raise ModelArchiverError(str(error)) from None

    @staticmethod
    def validate_inputs(model_name: str, export_path: str) -> None:
        """Refuse a bad name, and a file where a folder should be; a missing folder is made later."""
        ModelExportUtils.check_model_name_regex_or_exit(model_name)
        if os.path.exists(export_path) and not os.path.isdir(export_path):
            raise ModelArchiverError(f"Given export-path {export_path} is not a directory. Name a folder.")


def to_recipe(config: ModelArchiverConfig) -> Recipe:
    """A configuration in the archiver's own words."""
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
