"""The arguments of `flambeau models …` and `flambeau archive …`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flambeau.cli.options import DEFAULT_MANAGEMENT, Json, Management, ModelName, Version

models_app = typer.Typer(help="Manage the models of a running server.", no_args_is_help=True, rich_markup_mode=None)
archive_app = typer.Typer(help="Pack, inspect and unpack model archives.", no_args_is_help=True, rich_markup_mode=None)

ArchivePath = Annotated[Path, typer.Argument(help="A .mar or .tar.gz file.")]


@models_app.command("list", hidden=True)
@models_app.command("ls")
def models_ls(as_json: Json = False, url: Management = DEFAULT_MANAGEMENT) -> None:
    """List the models."""
    from flambeau.cli import management_client as models

    models.ls(url, as_json=as_json)


@models_app.command("describe")
def models_describe(
    name: ModelName, version: Version = None, as_json: Json = False, url: Management = DEFAULT_MANAGEMENT
) -> None:
    """Show the settings and workers of a model."""
    from flambeau.cli import management_client as models

    models.describe(url, name, version, as_json=as_json)


@models_app.command("register")
def models_register(
    source: Annotated[
        str,
        typer.Argument(metavar="NAME|PATH|URL", help="Archive or folder in the model store, or an allowed URL."),
    ],
    name: Annotated[str | None, typer.Option(help="Model name, instead of the one in the manifest.")] = None,
    handler: Annotated[str | None, typer.Option(help="Handler, instead of the one in the manifest.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Number of workers to start.")] = 1,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Maximum number of requests in a batch.")] = None,
    max_batch_delay: Annotated[
        int | None, typer.Option(min=0, help="Milliseconds to wait for a batch to fill.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until the workers have started.")] = True,
    as_json: Json = False,
    url: Management = DEFAULT_MANAGEMENT,
) -> None:
    """Register a model and start its workers."""
    from flambeau.cli import management_client as models

    overrides = {"model_name": name, "handler": handler, "batch_size": batch_size, "max_batch_delay": max_batch_delay}
    models.register(url, source, workers=workers, wait=wait, overrides=overrides, as_json=as_json)


@models_app.command("scale")
def models_scale(
    name: ModelName,
    workers: Annotated[int, typer.Argument(min=0, help="Number of workers.")],
    version: Version = None,
    wait: Annotated[bool, typer.Option(help="Wait until the workers have started.")] = True,
    as_json: Json = False,
    url: Management = DEFAULT_MANAGEMENT,
) -> None:
    """Change the number of workers of a model."""
    from flambeau.cli import management_client as models

    models.scale(url, name, version, workers, wait=wait, as_json=as_json)


@models_app.command("unregister", hidden=True)
@models_app.command("rm")
def models_rm(
    name: ModelName, version: Version = None, as_json: Json = False, url: Management = DEFAULT_MANAGEMENT
) -> None:
    """Unregister a model.

    Requests that it has accepted are answered first.
    """
    from flambeau.cli import management_client as models

    models.rm(url, name, version, as_json=as_json)


@models_app.command("default")
def models_default(
    name: ModelName,
    version: Annotated[str, typer.Argument(help="Model version.")],
    as_json: Json = False,
    url: Management = DEFAULT_MANAGEMENT,
) -> None:
    """Set the default version of a model."""
    from flambeau.cli import management_client as models

    models.set_default(url, name, version, as_json=as_json)


@models_app.command("traffic")
def models_traffic(
    name: ModelName,
    version: Annotated[str | None, typer.Argument(help="Model version.")] = None,
    percent: Annotated[
        int | None, typer.Argument(min=0, max=100, help="Percentage of requests; 0 ends the sharing.")
    ] = None,
    mirror: Annotated[
        int | None,
        typer.Option(min=0, max=100, help="Percentage of requests to copy to it, only to compare the answers."),
    ] = None,
    max_errors: Annotated[
        int | None,
        typer.Option(min=0, max=99, help="It gets no more once this percentage of its answers are server errors."),
    ] = None,
    as_json: Json = False,
    url: Management = DEFAULT_MANAGEMENT,
) -> None:
    """Give a version a part of the requests that name none.

    The default version gets the others. Without a percentage, show how the versions do.
    """
    from flambeau.cli import management_client as models

    if version is None or (percent is None and mirror is None and max_errors is None):
        models.traffic(url, name, version, as_json=as_json)
    else:
        models.set_traffic(url, name, version, percent, mirror, max_errors, as_json=as_json)


AdapterName = Annotated[str, typer.Argument(help="Name that requests use for the adapter.")]
BaseModel = Annotated[
    str | None, typer.Option("--model", help="Model of the adapter; required if several generate text.")
]


@models_app.command("load-adapter")
def models_load_adapter(
    name: AdapterName,
    path: Annotated[str, typer.Argument(metavar="FOLDER", help="LoRA adapter as PEFT saves it, on the server.")],
    model: BaseModel = None,
    as_json: Json = False,
    url: Management = DEFAULT_MANAGEMENT,
) -> None:
    """Load a LoRA adapter for a language model."""
    from flambeau.cli import management_client as models

    models.load_adapter(url, name, path, model, as_json=as_json)


@models_app.command("unload-adapter")
def models_unload_adapter(
    name: AdapterName, model: BaseModel = None, as_json: Json = False, url: Management = DEFAULT_MANAGEMENT
) -> None:
    """Unload a LoRA adapter.

    Requests that use it are answered first.
    """
    from flambeau.cli import management_client as models

    models.unload_adapter(url, name, model, as_json=as_json)


@archive_app.command("pack")
def archive_pack(
    model_name: Annotated[str, typer.Option(help="Model name; also the name of the archive.")],
    handler: Annotated[str, typer.Option(help="Handler file, or the name of a built-in handler.")],
    version: Annotated[str, typer.Option("--version", "-v", help="Model version.")] = "1.0",
    serialized_file: Annotated[
        Path | None, typer.Option(help="Weights, or a whole model (TorchScript, torch.export, ONNX …).")
    ] = None,
    model_file: Annotated[Path | None, typer.Option(help="Python file with the model's class, for weights.")] = None,
    extra_files: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Files, folders or patterns; repeatable.")
    ] = None,
    requirements_file: Annotated[
        Path | None, typer.Option("--requirements-file", "-r", help="A requirements.txt for the handler.")
    ] = None,
    config_file: Annotated[Path | None, typer.Option("--config-file", "-c", help="A model-config.yaml.")] = None,
    runtime: Annotated[str, typer.Option(help="python, python3 or LSP.")] = "python",
    export_path: Annotated[Path, typer.Option(help="Folder for the archive.")] = Path("."),
    archive_format: Annotated[
        str, typer.Option("--format", "--archive-format", help="default (.mar), zip-store, tgz or no-archive.")
    ] = "default",
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite an existing archive.")] = False,
    as_json: Json = False,
) -> None:
    """Pack a handler and its files into an archive."""
    from flambeau.archive.pack import Recipe
    from flambeau.cli import archive

    recipe = Recipe(
        model_name=model_name,
        handler=handler,
        version=version,
        serialized_file=serialized_file,
        model_file=model_file,
        extra_files=tuple(part for value in extra_files or () for part in value.split(",") if part),
        requirements_file=requirements_file,
        config_file=config_file,
        runtime=runtime,
    )
    archive.pack(recipe, export_path, archive_format, force=force, as_json=as_json)


@archive_app.command("inspect")
def archive_inspect(path: ArchivePath, as_json: Json = False) -> None:
    """Show an archive's manifest and files."""
    from flambeau.cli import archive

    archive.inspect(path, as_json=as_json)


@archive_app.command("unpack")
def archive_unpack(
    path: ArchivePath, into: Annotated[Path, typer.Option(help="Folder to unpack into; it must be new or empty.")]
) -> None:
    """Unpack an archive safely.

    Nothing is written outside of the folder, whatever the archive contains.
    """
    from flambeau.cli import archive

    archive.unpack(path, into)
