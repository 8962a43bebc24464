"""The `flambeau` command: what it is told; each subcommand's work lives in a module of its own, loaded when used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flambeau.cli.llm_commands import llm_app
from flambeau.cli.options import DEFAULT_INFERENCE, DEFAULT_MANAGEMENT, Inference, Json, Management, Version

app = typer.Typer(
    name="flambeau",
    help="A model server for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
models_app = typer.Typer(help="Look after the models of a running server.", no_args_is_help=True, rich_markup_mode=None)
archive_app = typer.Typer(help="Pack, inspect and unpack model archives.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(models_app, name="models")
app.add_typer(archive_app, name="archive")
app.add_typer(llm_app, name="llm")


def say_version(is_asked: bool) -> None:
    """What `flambeau version` says."""
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def flambeau(
    _: Annotated[
        bool, typer.Option("--version", help="Say which version this is.", is_eager=True, callback=say_version)
    ] = False,
) -> None:
    """A model server for PyTorch."""


@app.command()
def serve(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="A handler file, a model file, an archive, a model folder or a store; none: the examples."),
    ] = None,
    model_store: Annotated[Path | None, typer.Option(help="Where models are registered from at run time.")] = None,
    name: Annotated[str | None, typer.Option(help="The name of the model; else from its manifest or file.")] = None,
    handler: Annotated[str | None, typer.Option(help="Replaces the handler the model names.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Workers per model; else its own number, or 1.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="The most requests run together.")] = None,
    max_batch_delay: Annotated[int | None, typer.Option(min=0, help="Ms to wait for a batch to fill.")] = None,
    response_timeout: Annotated[float | None, typer.Option(min=0.1, help="Seconds to answer; else 120.")] = None,
    startup_timeout: Annotated[float | None, typer.Option(min=0.1, help="Seconds to load; else 120.")] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The inference API's port; 0: any free one.")] = 8080,
    management_port: Annotated[int, typer.Option(min=0, max=65535, help="The management API's port.")] = 8081,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="The metrics API's port; 0: no such API.")] = 8082,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC inference's port; 0: none.")] = 0,
    grpc_management_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC management's port; 0: none.")] = 0,
    require_token: Annotated[
        bool | None,
        typer.Option("--require-token/--no-token", help="Ask for keys; by default on all but loopback addresses."),
    ] = None,
    allow_unprotected: Annotated[
        bool, typer.Option("--allow-unprotected", help="Let other machines in although no keys are asked for.")
    ] = False,
    allow_url: Annotated[
        list[str] | None, typer.Option(help="Regular expression of URLs models may be fetched from; repeatable.")
    ] = None,
    allow_private_urls: Annotated[
        bool, typer.Option("--allow-private-urls", help="Let allowed URLs lead into private networks.")
    ] = False,
    job_queue_size: Annotated[int, typer.Option(min=1, help="Requests that may wait, per model.")] = 100,
    max_request_size: Annotated[int, typer.Option(min=1, help="The largest request body, in bytes.")] = 6_553_500,
    max_response_size: Annotated[int, typer.Option(min=1, help="The largest reply part, in bytes.")] = 6_553_500,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds to finish accepted requests on SIGTERM.")] = 30,
    worker_transport: Annotated[str, typer.Option(help="How workers are reached: unix or tcp.")] = "unix",
    watch: Annotated[bool, typer.Option("--watch", help="Reload handlers whose code changes, for developing.")] = False,
    error_details: Annotated[
        bool | None, typer.Option(help="Put causes into error answers; by default only on a loopback address.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_folder: Annotated[
        Path | None, typer.Option(help="Write TorchServe's five log files there, and its log lines to stdout.")
    ] = None,
    access_log: Annotated[
        bool | None, typer.Option(help="Log every request; by default only where there is a log folder.")
    ] = None,
    metrics_mode: Annotated[str, typer.Option(help="prometheus, log, both or legacy.")] = "prometheus",
    metrics_config: Annotated[Path | None, typer.Option(help="A metrics.yaml; else the bundled one.")] = None,
) -> None:
    """Serve models until SIGTERM or Ctrl-C."""
    from flambeau.cli import serve as work
    from flambeau.config.server import Address, GrpcConfig, KeysConfig, MetricsConfig, ServerConfig, check_pattern

    if worker_transport not in ("unix", "tcp"):
        raise typer.BadParameter("it may be unix or tcp", param_hint="--worker-transport")
    if log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter("it may be debug, info, warning or error", param_hint="--log-level")
    if metrics_mode not in ("prometheus", "log", "both", "legacy"):
        raise typer.BadParameter("it may be prometheus, log, both or legacy", param_hint="--metrics-mode")
    config = ServerConfig(
        inference=Address(host, port),
        management=Address(host, management_port),
        metrics=Address(host, metrics_port) if metrics_port else None,
        grpc=GrpcConfig(
            inference=Address(host, grpc_port) if grpc_port else None,
            management=Address(host, grpc_management_port) if grpc_management_port else None,
        ),
        keys=KeysConfig(is_on=require_token),
        allow_unprotected=allow_unprotected,
        allowed_urls=tuple(check_pattern("--allow-url", url) for url in allow_url or ()),
        allow_private_urls=allow_private_urls,
        model_store=work.store_of(paths or [], model_store),
        job_queue_size=job_queue_size,
        max_request_bytes=max_request_size,
        max_response_bytes=max_response_size,
        drain_timeout_s=drain_timeout,
        worker_transport="tcp" if worker_transport == "tcp" else "unix",
        error_details=error_details,
        watch=watch,
        log_folder=log_folder,
        access_log=access_log,
        # A handler's metrics are shown without being named in a file first.
        measure=MetricsConfig(mode=metrics_mode, file=metrics_config, auto_detect=True),  # type: ignore[arg-type]
    )
    settings = {
        "min_workers": workers,
        "max_workers": workers,
        "batch_size": batch_size,
        "batch_delay_s": None if max_batch_delay is None else max_batch_delay / 1000,
        "response_timeout_s": response_timeout,
        "startup_timeout_s": startup_timeout,
    }
    given = {key: value for key, value in settings.items() if value is not None}
    wishes = work.Wishes(settings=given, name=name, handler=handler)
    work.serve(config, paths or [], wishes, log_level=log_level)


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="The name of the model.")],
    source: Annotated[str, typer.Argument(metavar="FILE|-", help="What to send: a file, or - for standard input.")],
    version: Version = None,
    content_type: Annotated[str | None, typer.Option(help="Else guessed from the file's name.")] = None,
    url: Inference = DEFAULT_INFERENCE,
) -> None:
    """Send a file to a model and print its answer."""
    from flambeau.cli import client

    client.predict(url, model, version, source, content_type)


@app.command()
def run(
    path: Annotated[Path, typer.Argument(help="A handler file, model file, model folder or archive.")],
    input_file: Annotated[
        list[Path] | None, typer.Option("--input", "-i", help="A request body; several make a batch.")
    ] = None,
    content_type: Annotated[str | None, typer.Option(help="Else guessed from each file's name.")] = None,
    handler: Annotated[str | None, typer.Option(help="Replaces the handler the model names.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Calls; the first and the median one are shown.")] = 1,
    as_json: Json = False,
) -> None:
    """Run a handler in this process, without a server: for a debugger, and to see where its time goes."""
    from flambeau.cli import run as work

    work.run(path, input_file or [], content_type, handler=handler, repeat=repeat, as_json=as_json)


@app.command()
def check(
    handler: Annotated[Path, typer.Argument(help="A handler file, model file, model folder or archive.")],
    samples: Annotated[Path, typer.Option(help="A folder of request bodies that the handler should answer.")],
    batch_size: Annotated[int, typer.Option(min=1, help="The most requests to run together.")] = 4,
    content_type: Annotated[str | None, typer.Option(help="Else guessed from each file's name.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one call may take.")] = 10,
    as_json: Json = False,
) -> None:
    """Tell whether a handler is fit to serve: batches, bad requests, leaks. The exit status is 1 if it is not."""
    from flambeau.cli import check as work

    work.check(handler, samples, content_type, batch_size=batch_size, timeout_s=timeout, as_json=as_json)


@app.command()
def doctor(
    torchserve: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="CONFIG STORE", help="Say instead what of a TorchServe installation will work."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what this machine has, and what is missing. The exit status is 1 if something will not work."""
    from flambeau.cli import doctor as work

    work.doctor(torchserve, as_json=as_json)


@app.command()
def version() -> None:
    """Print the version."""
    from flambeau import __version__

    print(__version__)


@models_app.command("ls")
def models_ls(as_json: Json = False, url: Management = DEFAULT_MANAGEMENT) -> None:
    """List the models of a server."""
    from flambeau.cli import models

    models.ls(url, as_json=as_json)


@models_app.command("describe")
def models_describe(
    name: str, version: Version = None, as_json: Json = False, url: Management = DEFAULT_MANAGEMENT
) -> None:
    """Show a model: its settings, its workers, and why the last one failed."""
    from flambeau.cli import models

    models.describe(url, name, version, as_json=as_json)


@models_app.command("register")
def models_register(
    source: Annotated[str, typer.Argument(metavar="URL", help="An archive or folder in the server's model store.")],
    name: Annotated[str | None, typer.Option(help="Replaces the name in the manifest.")] = None,
    handler: Annotated[str | None, typer.Option(help="Replaces the handler in the manifest.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Workers to start.")] = 1,
    batch_size: Annotated[int | None, typer.Option(min=1)] = None,
    max_batch_delay: Annotated[int | None, typer.Option(min=0, help="In ms.")] = None,
    wait: Annotated[bool, typer.Option(help="Wait until the workers have started.")] = True,
    as_json: Json = False,
    url: Management = DEFAULT_MANAGEMENT,
) -> None:
    """Register a model and start its workers."""
    from flambeau.cli import models

    wishes = {"model_name": name, "handler": handler, "batch_size": batch_size, "max_batch_delay": max_batch_delay}
    models.register(url, source, workers=workers, wait=wait, wishes=wishes, as_json=as_json)


@models_app.command("scale")
def models_scale(
    name: str,
    workers: Annotated[int, typer.Argument(min=0, help="How many workers.")],
    version: Version = None,
    wait: Annotated[bool, typer.Option(help="Wait until the workers have started.")] = True,
    as_json: Json = False,
    url: Management = DEFAULT_MANAGEMENT,
) -> None:
    """Change how many workers a model has."""
    from flambeau.cli import models

    models.scale(url, name, version, workers, wait=wait, as_json=as_json)


@models_app.command("rm")
def models_rm(name: str, version: Version = None, as_json: Json = False, url: Management = DEFAULT_MANAGEMENT) -> None:
    """Unregister a model; what it has accepted is answered first."""
    from flambeau.cli import models

    models.rm(url, name, version, as_json=as_json)


@models_app.command("default")
def models_default(name: str, version: str, as_json: Json = False, url: Management = DEFAULT_MANAGEMENT) -> None:
    """Make a version the default one."""
    from flambeau.cli import models

    models.set_default(url, name, version, as_json=as_json)


@archive_app.command("pack")
def archive_pack(
    model_name: Annotated[str, typer.Option(help="The name the model is registered under.")],
    handler: Annotated[str, typer.Option(help="A handler file, or the name of a built-in handler.")],
    version: Annotated[str, typer.Option("--version", "-v")] = "1.0",
    serialized_file: Annotated[Path | None, typer.Option(help="Weights or a TorchScript file.")] = None,
    model_file: Annotated[Path | None, typer.Option(help="A Python file with the model's class.")] = None,
    extra_files: Annotated[list[str] | None, typer.Option(help="Files, folders or patterns; repeatable.")] = None,
    requirements_file: Annotated[Path | None, typer.Option("--requirements-file", "-r")] = None,
    config_file: Annotated[Path | None, typer.Option("--config-file", "-c", help="model-config.yaml")] = None,
    runtime: Annotated[str, typer.Option()] = "python",
    export_path: Annotated[Path, typer.Option(help="Where the archive goes.")] = Path("."),
    archive_format: Annotated[
        str, typer.Option("--format", "--archive-format", help="default, zip-store, tgz or no-archive.")
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
def archive_inspect(path: Path, as_json: Json = False) -> None:
    """Show an archive's manifest and files."""
    from flambeau.cli import archive

    archive.inspect(path, as_json=as_json)


@archive_app.command("unpack")
def archive_unpack(
    path: Path, into: Annotated[Path, typer.Option(help="The folder to unpack into; it must be new or empty.")]
) -> None:
    """Unpack an archive safely."""
    from flambeau.cli import archive

    archive.unpack(path, into)


def main() -> None:
    """Run the command; an expected error is one line on stderr and exit status 1."""
    from flambeau.errors import FlambeauError

    try:
        app()
    except FlambeauError as error:
        print(f"flambeau: {error}", file=sys.stderr)
        if cause := getattr(error, "cause", ""):
            print(cause, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
