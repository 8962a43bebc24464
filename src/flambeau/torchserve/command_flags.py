"""The flags of the `torchserve` command: TorchServe's, and a few more."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="torchserve", description="Serve PyTorch models")
    action = flags.add_mutually_exclusive_group()
    action.add_argument("-v", "--version", action="store_true", help="print the version")
    action.add_argument("--start", action="store_true", help="start the server (the default)")
    action.add_argument("--stop", action="store_true", help="stop the server that runs on this machine")
    flags.add_argument("--ts-config", metavar="FILE", help="config.properties; TS_CONFIG_FILE overrides it")
    flags.add_argument("--model-store", metavar="DIR", help="folder of archives and models")
    flags.add_argument("--workflow-store", metavar="DIR", help="folder of workflow archives (default: the model store)")
    flags.add_argument(
        "--models",
        nargs="+",
        metavar="[NAME=]MODEL",
        help="models to load: all, file.mar, a folder, a URL, name=file.mar",
    )
    flags.add_argument("--log-config", metavar="FILE", help="log4j2 configuration; must exist")
    flags.add_argument("--cpp-log-config", metavar="FILE", help="accepted; there is no C++ backend")
    flags.add_argument("--foreground", action="store_true", help="run in the foreground")
    flags.add_argument(
        "--no-config-snapshots", "--ncs", action="store_true", help="neither write snapshots nor start from one"
    )
    flags.add_argument("--plugins-path", "--ppath", metavar="PATH", help="accepted; plugins are Java programs")
    flags.add_argument("--disable-token-auth", "--dt", action="store_true", dest="token_auth", help="require no keys")
    flags.add_argument(
        "--enable-model-api",
        action="store_true",
        dest="model_mode",
        help="allow registration over the APIs",
    )
    ours = flags.add_argument_group("not in TorchServe")
    ours.add_argument("--enable-token-auth", action="store_true", help="require keys on a loopback address too")
    ours.add_argument("--allow-unprotected", action="store_true", help="accept other machines without keys")
    ours.add_argument("--pid-file", metavar="FILE", help="default: TS_PID_FILE, else TMPDIR/.model_server.pid")
    return flags


def to_properties(arguments: argparse.Namespace) -> dict[str, str]:
    """The flags as keys of config.properties; a switch can only turn something on."""
    given = {"model_store": arguments.model_store, "workflow_store": arguments.workflow_store}
    if arguments.models:
        given["load_models"] = ",".join(arguments.models)
    if arguments.token_auth:
        given["disable_token_authorization"] = "true"
    elif arguments.enable_token_auth:
        given["disable_token_authorization"] = "false"
    if arguments.model_mode:
        given["enable_model_api"] = "true"
    if arguments.allow_unprotected:
        given["allow_unprotected"] = "true"
    return {key: value for key, value in given.items() if value}


def worker_parser() -> argparse.ArgumentParser:
    """The flags of TorchServe's worker program, for code that builds its command line."""
    flags = argparse.ArgumentParser(prog="model-server-worker", description="Model server worker")
    flags.add_argument("--sock-type", required=True, choices=["unix", "tcp"], help="how the server is reached")
    flags.add_argument("--sock-name", help="path of the unix socket")
    flags.add_argument("--host", help="address of the TCP socket")
    flags.add_argument("--port", help="port of the TCP socket")
    flags.add_argument("--metrics-config", metavar="FILE", help="a metrics.yaml")
    flags.add_argument("--async", action="store_true", dest="async_comm", help="hold several requests at a time")
    return flags


class ArgParser:
    """The parsers of the `torchserve` command and of its workers (`ts.arg_parser`)."""

    @staticmethod
    def ts_parser() -> argparse.ArgumentParser:
        return parser()

    @staticmethod
    def model_service_worker_args() -> argparse.ArgumentParser:
        return worker_parser()

    @staticmethod
    def extract_args(args: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse these words, or those of this process."""
        return parser().parse_args(args or None)


def missing(arguments: argparse.Namespace, config: Path | None, temp: str | None) -> str | None:
    """The error for a file that the flags or variables name and that does not exist, in TorchServe's words."""
    if arguments.log_config and not Path(arguments.log_config).is_file():
        return f"--log-config file not found: {Path(arguments.log_config).resolve()}"
    if temp and not Path(temp).is_dir():
        return f"Invalid temp directory: {temp}, please check TEMP environment variable."
    if config is not None and not config.is_file():
        return f"--ts-config file not found: {config}"
    return None


def missing_folders(arguments: argparse.Namespace, store: str | None) -> str | None:
    """As `missing`, for folders that the config file may name instead; `store` is the model store."""
    if not store:
        return "Missing mandatory parameter --model-store"
    if not Path(store).is_dir():
        return f"--model-store directory not found: {store}"
    if arguments.workflow_store and not Path(arguments.workflow_store).is_dir():
        return f"--workflow-store directory not found: {arguments.workflow_store}"
    if arguments.cpp_log_config and not Path(arguments.cpp_log_config).is_file():
        return f"--cpp-log-config file not found: {Path(arguments.cpp_log_config).resolve()}"
    return None
