"""The `flambeau` command. The work of each subcommand is in a module that is imported when it is used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flambeau.cli.key_commands import keys_app
from flambeau.cli.llm_commands import llm_app
from flambeau.cli.model_commands import archive_app, models_app
from flambeau.cli.options import (
    DEFAULT_INFERENCE,
    DEFAULT_KEY_FILE,
    AllowUnprotected,
    Host,
    Inference,
    Json,
    KeyExpiry,
    KeyFile,
    LogLevel,
    ManagementPort,
    MetricsPort,
    Port,
    RequireToken,
    Version,
)

LARGEST = 2**31 - 1  # of a number on the command line

app = typer.Typer(
    name="flambeau",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(models_app, name="models")
app.add_typer(archive_app, name="archive")
app.add_typer(llm_app, name="llm")
app.add_typer(keys_app, name="keys")


def print_version(is_given: bool) -> None:
    if is_given:
        version()
        raise typer.Exit


@app.callback()
def flambeau(
    _: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=print_version)
    ] = False,
) -> None:
    """A model server for PyTorch.

    Start with `flambeau serve`, which serves two example models.
    """


@app.command()
def serve(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(hidden=True),  # typer would show its Python type
    ] = None,
    model_store: Annotated[
        Path | None, typer.Option(help="Folder from which models can be registered while the server runs.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name. Default: from the manifest or the file name.")] = None,
    handler: Annotated[
        str | None, typer.Option(help="Built-in name or file of the handler, instead of the model's own.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, max=10_000, help="Workers per model. Default: from model-config.yaml, or 1.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Maximum number of requests in a batch.")
    ] = None,
    max_batch_delay: Annotated[
        int | None, typer.Option(min=0, max=LARGEST, help="Milliseconds to wait for a batch to fill.")
    ] = None,
    response_timeout: Annotated[
        float | None, typer.Option(min=0.1, max=LARGEST, help="Seconds a worker may take for a batch. Default: 120.")
    ] = None,
    startup_timeout: Annotated[
        float | None,
        typer.Option(min=0.1, max=LARGEST, help="Seconds a worker may take to load its model. Default: 120."),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    management_port: ManagementPort = 8081,
    metrics_port: MetricsPort = 8082,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of gRPC inference; 0 disables it.")] = 0,
    grpc_management_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of gRPC management; 0 disables it.")
    ] = 0,
    require_token: RequireToken = None,
    key_file: KeyFile = DEFAULT_KEY_FILE,
    key_expiry: KeyExpiry = None,
    allow_unprotected: AllowUnprotected = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name of the server in URLs, such as *.example.com; needed without a token; repeatable.",
        ),
    ] = None,
    allow_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Regular expression of URLs from which models may be downloaded; repeatable."
        ),
    ] = None,
    allow_private_urls: Annotated[
        bool, typer.Option("--allow-private-urls", help="Allow downloads from addresses in private networks.")
    ] = False,
    min_download_rate: Annotated[
        int, typer.Option(min=0, max=LARGEST, help="Bytes per second, over 30 s, below which a download is aborted.")
    ] = 10_000,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Report ready although models of a store could not be loaded.")
    ] = False,
    safe_weights: Annotated[
        bool, typer.Option("--safe-weights", help="Reject model files of formats that can run code.")
    ] = False,
    job_queue_size: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="Maximum number of waiting requests per model.")
    ] = 100,
    max_request_size: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="Maximum size of a request body in bytes.")
    ] = 6_553_500,
    max_response_size: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="Maximum size of a response, or of a part of a stream, in bytes.")
    ] = 6_553_500,
    drain_timeout: Annotated[
        float, typer.Option(min=0, max=LARGEST, help="Seconds to finish accepted requests when the server stops.")
    ] = 30,
    worker_transport: Annotated[str, typer.Option(help="Sockets between server and workers: unix or tcp.")] = "unix",
    watch: Annotated[bool, typer.Option("--watch", help="Reload handlers when their code changes.")] = False,
    error_details: Annotated[
        bool | None, typer.Option(help="Include tracebacks in error responses. Default: only on a loopback host.")
    ] = None,
    log_level: LogLevel = "info",
    log_folder: Annotated[
        Path | None, typer.Option(help="Folder for log files (ts_log.log and others). Default: log to stderr only.")
    ] = None,
    access_log: Annotated[bool | None, typer.Option(help="Log every request. Default: only with --log-folder.")] = None,
    metrics_mode: Annotated[str, typer.Option(help="prometheus, log, both or legacy.")] = "prometheus",
    metrics_config: Annotated[Path | None, typer.Option(help="A metrics.yaml. Default: the built-in one.")] = None,
) -> None:
    """Serve models until SIGTERM or Ctrl-C.

    Paths are handler files, model files, archives, model folders or stores. Without any, two examples are served.
    """
    from flambeau.cli import serve as work
    from flambeau.config.server import Address, GrpcConfig, KeysConfig, MetricsConfig, ServerConfig, check_pattern

    if worker_transport not in ("unix", "tcp"):
        raise typer.BadParameter(f"{worker_transport!r} is not one of unix, tcp", param_hint="--worker-transport")
    if log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter(f"{log_level!r} is not one of debug, info, warning, error", param_hint="--log-level")
    if metrics_mode not in ("prometheus", "log", "both", "legacy"):
        raise typer.BadParameter(
            f"{metrics_mode!r} is not one of prometheus, log, both, legacy", param_hint="--metrics-mode"
        )
    config = ServerConfig(
        inference=Address(host, port),
        management=Address(host, management_port),
        metrics=Address(host, metrics_port) if metrics_port else None,
        grpc=GrpcConfig(
            inference=Address(host, grpc_port) if grpc_port else None,
            management=Address(host, grpc_management_port) if grpc_management_port else None,
        ),
        keys=KeysConfig(is_on=require_token, file=key_file, expiry_s=key_expiry),
        allowed_hosts=tuple(allow_host or ()),
        allow_unprotected=allow_unprotected,
        names_json=True,
        plain_errors=True,
        allowed_urls=tuple(check_pattern("--allow-url", url) for url in allow_url or ()),
        allow_private_urls=allow_private_urls,
        min_download_rate=min_download_rate,
        allow_missing=allow_missing,
        safe_weights=safe_weights,
        model_store=work.find_store(paths or [], model_store),
        job_queue_size=job_queue_size,
        max_request_bytes=max_request_size,
        max_response_bytes=max_response_size,
        drain_timeout_s=drain_timeout,
        worker_transport="tcp" if worker_transport == "tcp" else "unix",
        error_details=error_details,
        watch=watch,
        log_folder=log_folder,
        access_log=access_log,
        # auto_detect: metrics of handlers are shown without an entry in metrics.yaml.
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
    overrides = work.ModelOverrides(settings=given, name=name, handler=handler)
    work.serve(config, paths or [], overrides, log_level=log_level)


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="Model name.")],
    source: Annotated[str, typer.Argument(metavar="FILE|-", help="File to send, or - for standard input.")],
    version: Version = None,
    content_type: Annotated[str | None, typer.Option(help="Default: guessed from the file name.")] = None,
    url: Inference = DEFAULT_INFERENCE,
) -> None:
    """Send a file to a model and print the response."""
    from flambeau.cli import api_client

    api_client.predict(url, model, version, source, content_type)


@app.command()
def run(
    path: Annotated[Path, typer.Argument(help="Handler file, model file, model folder or archive.")],
    input_file: Annotated[
        list[Path] | None,
        typer.Option("--input", "-i", metavar="FILE", help="File with a request body; repeat it for a batch."),
    ] = None,
    content_type: Annotated[str | None, typer.Option(help="Default: guessed from each file name.")] = None,
    handler: Annotated[
        str | None, typer.Option(help="Built-in name or file of the handler, instead of the model's own.")
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Number of calls; the times of the first and the median call are shown.")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Run a handler without a server and time its stages.

    The handler runs in this process, so that a debugger can stop in it.
    """
    from flambeau.cli import run as work

    work.run(path, input_file or [], content_type, handler=handler, repeat=repeat, as_json=as_json)


@app.command()
def check(
    handler: Annotated[Path, typer.Argument(help="Handler file, model file, model folder or archive.")],
    samples: Annotated[Path, typer.Option(help="Folder of request bodies that the handler should answer.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Largest batch to test.")] = 4,
    content_type: Annotated[str | None, typer.Option(help="Default: guessed from each file name.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one call may take.")] = 10,
    as_json: Json = False,
) -> None:
    """Test a handler with batches and malformed requests.

    It is also tested for memory leaks. The exit status is 1 if there is a problem.
    """
    from flambeau.cli import check as work

    work.check(handler, samples, content_type, batch_size=batch_size, timeout_s=timeout, as_json=as_json)


@app.command()
def doctor(
    torchserve: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="CONFIG STORE", help="Check a TorchServe config.properties and model store instead."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what is installed here and what is missing.

    The exit status is 1 if something does not work.
    """
    from flambeau.cli import doctor as work

    work.doctor(torchserve, as_json=as_json)


@app.command()
def version() -> None:
    """Print the version."""
    from flambeau import __version__

    print(__version__)


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
