"""The `flambeau` command. The work of each subcommand is in a module that is imported when it is used."""

from __future__ import annotations

import copy
import gc
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.main import get_command_name
from typer.models import CommandInfo

from flambeau.cli.cluster_commands import cluster_app
from flambeau.cli.key_commands import keys_app
from flambeau.cli.llm_commands import llm_app
from flambeau.cli.model_commands import archive_app, models_app
from flambeau.cli.options import (
    DEFAULT_INFERENCE,
    DEFAULT_MANAGEMENT,
    EPILOG,
    ConfigCommand,
    Inference,
    Json,
    Management,
    ModelName,
    SettingsCommand,
    Version,
    settings_of,
)

app = typer.Typer(
    name="flambeau",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Show the configuration of a server.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")
app.add_typer(models_app, name="models")
app.add_typer(archive_app, name="archive")
app.add_typer(llm_app, name="llm")
app.add_typer(keys_app, name="keys")
app.add_typer(cluster_app, name="cluster")


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


@app.command(cls=SettingsCommand, epilog=EPILOG)
def serve(ctx: typer.Context) -> None:
    """Serve models until SIGTERM or Ctrl-C.

    Paths are handler files, model files, archives, model folders or stores, or models of the Hugging Face hub
    (org/name, org/name@revision). Without any, two examples are served.
    """
    gc.disable()  # until the server listens
    from flambeau.cli import serve as work

    work.serve_settings(settings_of(ctx))


@config_app.command("show", cls=ConfigCommand)
def config_show(
    ctx: typer.Context,
    llm: Annotated[bool, typer.Option("--llm", help="Of `flambeau llm serve` instead of `flambeau serve`.")] = False,
    changed: Annotated[bool, typer.Option("--changed", help="Only settings that are not the default.")] = False,
    as_json: Json = False,
) -> None:
    """Show the settings that hold, and where each one comes from.

    It takes the flags of the server. The exit status is 1 if the server would not start with these settings.
    """
    from flambeau.cli import config_show as work
    from flambeau.config.settings import LLM_SERVE, SERVE

    table = LLM_SERVE if llm else SERVE
    work.show(settings_of(ctx, table), table, changed=changed, as_json=as_json)


@app.command()
def predict(
    model: ModelName,
    source: Annotated[str, typer.Argument(metavar="FILE|-", help="File to send, or - for standard input.")],
    version: Version = None,
    content_type: Annotated[str | None, typer.Option(help="Default: guessed from the file name.")] = None,
    url: Inference = DEFAULT_INFERENCE,
) -> None:
    """Send a file to a model and print the response."""
    from flambeau.cli import api_client

    api_client.predict(url, model, version, source, content_type)


@app.command()
def slow(
    model: Annotated[str | None, typer.Argument(help="Only requests of this model.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=500, help="How many requests.")] = 10,
    as_json: Json = False,
    url: Management = DEFAULT_MANAGEMENT,
) -> None:
    """Show where the time of the slowest requests went.

    They are those of the last hour.
    """
    from flambeau.cli import management_client as models

    models.slow(url, model, limit, as_json=as_json)


@app.command()
def run(
    path: Annotated[Path, typer.Argument(help="Handler file, model file, model folder or archive.")],
    input_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help="File with a request body; repeat it for a batch. Default: the handler's `example`.",
        ),
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
def replay(
    bundle: Annotated[
        Path | None, typer.Argument(help="Crash bundle: its folder, or the name of one in the crash folder.")
    ] = None,
    payload: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Request body, if the bundle holds none.")
    ] = None,
    content_type: Annotated[str | None, typer.Option(help="Default: that of the recorded request.")] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The model, if it is not where it was served from.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            envvar="FLAMBEAU_CRASH_FOLDER",
            help="Crash folder of the server. Default: that of a server without a log folder.",
        ),
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the bundles, the newest first.")] = False,
    as_json: Json = False,
) -> None:
    """Try the request of a crash bundle again.

    It is sent to a fresh worker. Without a bundle, list them. The exit status is 1 if the worker dies or hangs again,
    and 2 if it was not tried.
    """
    from flambeau.cli import replay as work

    work.replay(bundle, payload, content_type, model=model, folder=folder, list_all=list_all, as_json=as_json)


@app.command()
def check(
    handler: Annotated[Path, typer.Argument(help="Handler file, model file, model folder or archive.")],
    samples: Annotated[
        Path | None,
        typer.Option(help="Folder of request bodies that the handler should answer. Default: the handler's `example`."),
    ] = None,
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
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ray[=HOST:PORT]", help="Check the machines of a cluster instead: versions, tokens."),
    ] = None,
    worker_address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="With --cluster: where its machines reach this one.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Show what is installed here and what is missing.

    The exit status is 1 if something does not work.
    """
    from flambeau.cli import doctor as work

    if cluster is not None:
        from flambeau.cli.cluster_doctor import examine_cluster

        work.report(examine_cluster(cluster, worker_address), as_json=as_json)
    else:
        work.doctor(torchserve, as_json=as_json)


@app.command()
def version() -> None:
    """Print the version."""
    from flambeau import __version__

    print(__version__)


def app_with(word: str) -> typer.Typer:
    """The app with this command alone: Typer builds all that it has, which takes longer than a short command."""
    commands = [each for each in app.registered_commands if each.callback is not None and name_of(each) == word]
    groups = [each for each in app.registered_groups if each.name == word]
    if not commands and not groups:
        return app
    one = copy.copy(app)
    one.registered_commands, one.registered_groups = commands, groups
    return one


def name_of(command: CommandInfo) -> str:
    assert command.callback is not None
    return command.name or get_command_name(command.callback.__name__)


def name_numbers() -> None:
    """Call numbers so in errors and help; Typer's name of one with limits is `int range`."""
    for module in filter(None, map(sys.modules.get, ("typer._click.types", "click.types"))):
        for kind, name in (("Int", "whole number"), ("Float", "number")):
            for each in (f"{kind}ParamType", f"{kind}Range"):
                getattr(module, each).name = name


def main() -> None:
    """Run the command; an expected error is one line on stderr and exit status 1."""
    from flambeau.errors import FlambeauError

    name_numbers()
    try:
        app_with(sys.argv[1] if len(sys.argv) > 1 else "")()
    except FlambeauError as error:
        print(f"flambeau: {error}", file=sys.stderr)
        if (cause := error.cause) and cause not in str(error):
            print(cause, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
