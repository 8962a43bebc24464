"""`flambeau keys …`: shows and changes the key file of a server. A running server reads it again within a second."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from flambeau.cli.options import DEFAULT_MANAGEMENT, Json, Management
from flambeau.errors import ConfigError, suggest

if TYPE_CHECKING:
    from flambeau.frontend.key_file import ApiKey
    from flambeau.serving.tenants import KeyLimits

keys_app = typer.Typer(help="Make, list and revoke the keys of a server.", no_args_is_help=True, rich_markup_mode=None)

KeyFile = Annotated[
    Path, typer.Option("--file", envvar="FLAMBEAU_KEY_FILE", help="Key file of the server, in its working folder.")
]
KeyName = Annotated[str, typer.Argument(help="inference, management, API, or a name of your own.")]
DEFAULT_FILE = Path("key_file.json")


@keys_app.command("new")
def keys_new(
    name: KeyName = "inference",
    api: Annotated[
        str | None, typer.Option(help="API of a key with a name of your own: inference (default) or management.")
    ] = None,
    expires_in: Annotated[
        float | None, typer.Option(min=1, help="Seconds until it expires. Default: valid until it is revoked.")
    ] = None,
    file: KeyFile = DEFAULT_FILE,
) -> None:
    """Make a key and print it.

    The keys inference, management and API are replaced: the old one ends. A key with a name of your own is added.
    """
    from flambeau.frontend.key_file import KINDS, Kind, locked, new_key, to_document, write_private

    if name in KINDS and api is not None:
        raise ConfigError(f"--api is for keys with a name of your own; {name} is for the {name} API")
    if api is not None and api not in get_args(Kind):
        raise ConfigError(f"--api may be {' or '.join(get_args(Kind))}, not {api!r}")
    check_name(name)
    expires_at = None if expires_in is None else time.time() + expires_in
    key = new_key(expires_at, "" if name in KINDS else api or "inference")
    try:
        with locked(file):
            keys = load(file, may_be_empty=True)
            if name in keys and name not in KINDS:
                raise ConfigError(f"there is a key {name} already; revoke it first: flambeau keys revoke {name}")
            write_private(file, to_document({**keys, name: key}))
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; name another with --file") from None
    print(key.secret)
    if name in keys:
        print(f"flambeau: the old {name} key is not valid any more", file=sys.stderr)


RequestsPerMinute = Annotated[int | None, typer.Option(min=1, help="Requests a minute.")]
TokensPerMinute = Annotated[int | None, typer.Option(min=1, help="Tokens a minute, of prompts and replies.")]
Concurrent = Annotated[int | None, typer.Option("--concurrent", min=1, help="Requests at a time.")]
Models = Annotated[list[str] | None, typer.Option("--model", help="A model that it is for; may be repeated.")]
Priority = Annotated[
    str | None, typer.Option(help="Priority of its requests, and the highest they may ask for: high, normal or low.")
]
Weight = Annotated[
    float | None, typer.Option(help="Share of a busy model in proportion to other keys, 0.01 to 100; 1 by default.")
]


@keys_app.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(help="A name of your own, such as that of a user.")],
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    concurrent: Concurrent = None,
    models: Models = None,
    priority: Priority = None,
    weight: Weight = None,
    expires_in: Annotated[
        float | None, typer.Option(min=1, help="Seconds until it expires. Default: valid until it is revoked.")
    ] = None,
    file: KeyFile = DEFAULT_FILE,
) -> None:
    """Add a key of a user, with limits, and print it.

    It is one of the inference API.
    """
    from flambeau.frontend.key_file import KINDS, new_key

    if name in KINDS:
        raise ConfigError(f"{name} is a key of the server itself; flambeau keys new {name} replaces it")
    limits = limits_of(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent=concurrent,
        models=models,
        priority=priority,
        weight=weight,
    )
    expires_at = None if expires_in is None else time.time() + expires_in
    key = new_key(expires_at, "inference", limits)
    put_key(name, key, file, is_new=True)
    print(key.secret)


@keys_app.command("limit")
def keys_limit(
    name: KeyName,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    concurrent: Concurrent = None,
    models: Models = None,
    priority: Priority = None,
    weight: Weight = None,
    file: KeyFile = DEFAULT_FILE,
) -> None:
    """Set the limits of a key; those that are not given end."""
    from dataclasses import replace

    key = named(name, load(file), file)
    limits = limits_of(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent=concurrent,
        models=models,
        priority=priority,
        weight=weight,
    )
    put_key(name, replace(key, limits=limits), file, is_new=False)
    print(f"{name}: {shown_limits(limits) or 'no limits'}")


def limits_of(**given: Any) -> KeyLimits:
    from flambeau.frontend.key_file import read_limits

    return read_limits({name: value for name, value in given.items() if value})


def put_key(name: str, key: ApiKey, file: Path, *, is_new: bool) -> None:
    """Write a key to the file; a new one must have a new name."""
    from flambeau.frontend.key_file import locked, to_document, write_private

    check_name(name)
    try:
        with locked(file):
            keys = load(file, may_be_empty=is_new)
            if is_new and name in keys:
                raise ConfigError(f"there is a key {name} already; revoke it first: flambeau keys revoke {name}")
            if not is_new:
                named(name, keys, file)
            write_private(file, to_document({**keys, name: key}))
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; name another with --file") from None


def check_name(name: str) -> None:
    if not re.fullmatch(r"[\w.@-]{1,64}", name):
        raise ConfigError(f"{name!r} is not a name of 1 to 64 letters, digits, dots and dashes")


def shown_limits(limits: KeyLimits) -> str:
    from flambeau.frontend.key_file import limits_document

    words = {"requests_per_minute": "requests/min", "tokens_per_minute": "tokens/min", "max_concurrent": "at a time"}
    found = []
    for name, value in limits_document(limits).items():
        text = ", ".join(value) if isinstance(value, list) else str(value)
        found.append(f"{text} {words[name]}" if name in words else f"{name} {text}")
    return "; ".join(found)


@keys_app.command("usage")
def keys_usage(as_json: Json = False, url: Management = DEFAULT_MANAGEMENT) -> None:
    """Show what was used with each key since the server has started."""
    from flambeau.cli.api_client import call
    from flambeau.cli.output import print_json, print_table

    keys = call(url, "GET", "/keys")["keys"]
    if as_json:
        print_json(keys)
        return
    rows = [
        [
            key["name"],
            *(str(key[name]) for name in ("requests", "running", "prompt_tokens", "output_tokens")),
            ", ".join(f"{number} {limit}" for limit, number in key["rejected"].items()) or "0",
        ]
        for key in keys
        if key["api"] == "inference"
    ]
    print_table(["NAME", "REQUESTS", "RUNNING", "PROMPT TOKENS", "OUTPUT TOKENS", "REJECTED"], rows)


@keys_app.command("list")
def keys_list(as_json: Json = False, file: KeyFile = DEFAULT_FILE) -> None:
    """List the keys, without their secrets."""
    from flambeau.cli.output import print_json, print_table
    from flambeau.frontend.key_file import kind_of, limits_document, to_instant

    keys = load(file)
    rows = [
        [name, kind_of(name, key), to_instant(key.expires_at) if key.expires_at else "never", f"{key.secret[:4]}…"]
        for name, key in keys.items()
    ]
    if as_json:
        found = [dict(zip(("name", "api", "expires", "begins"), row, strict=True)) for row in rows]
        limits = [limits_document(key.limits) for key in keys.values()]
        print_json([{**entry, "limits": one} if one else entry for entry, one in zip(found, limits, strict=True)])
    else:
        limited = [shown_limits(key.limits) for key in keys.values()]
        if any(limited):
            rows = [[*row, text] for row, text in zip(rows, limited, strict=True)]
        print_table(["NAME", "API", "EXPIRES", "KEY", *(["LIMITS"] if any(limited) else [])], rows)


@keys_app.command("show")
def keys_show(name: KeyName = "inference", file: KeyFile = DEFAULT_FILE) -> None:
    """Print a key, for the Authorization header of a request."""
    print(named(name, load(file), file).secret)


@keys_app.command("revoke")
def keys_revoke(name: KeyName, file: KeyFile = DEFAULT_FILE) -> None:
    """Revoke a key: from now on it is refused."""
    from flambeau.frontend.key_file import locked, to_document, write_private

    named(name, load(file), file)
    try:
        with locked(file):
            keys = load(file)
            named(name, keys, file)
            del keys[name]
            write_private(file, to_document(keys))
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
    print(f"{name} is revoked")


def load(file: Path, *, may_be_empty: bool = False) -> dict[str, ApiKey]:
    """The keys of a file; raises if there are none, or if others may know them."""
    from flambeau.frontend.key_file import exposure, read_keys
    from flambeau.small_files import read_small

    if not file.exists():
        raise ConfigError(f"{file} does not exist; name the key file of the server with --file")
    try:
        if may_be_empty and read_small(file).strip() in (b"", b"{}"):
            return {}
        problem = exposure(file.lstat(), file.stat())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; name a key file with --file") from None
    if problem:
        raise ConfigError(f"{file} is not used: {problem}")
    if not (keys := read_keys(file)):
        raise ConfigError(f"{file} has no keys; name the key file of a server with --file")
    return keys


def named(name: str, keys: dict[str, ApiKey], file: Path) -> ApiKey:
    if (key := keys.get(name)) is None:
        nearest = suggest(name, keys)
        hint = f"; did you mean {nearest}?" if nearest else f"; it has {', '.join(keys)}"
        raise ConfigError(f"{file} has no key {name!r}{hint}")
    return key
