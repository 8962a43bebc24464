"""`flambeau keys …`: shows and changes the key file of a server. A running server reads it again within a second."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from flambeau.cli.options import Json
from flambeau.errors import ConfigError, suggest

if TYPE_CHECKING:
    from flambeau.frontend.key_file import ApiKey

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
    if not re.fullmatch(r"[\w.@-]{1,64}", name):
        raise ConfigError(f"{name!r} is not a name of 1 to 64 letters, digits, dots and dashes")
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


@keys_app.command("list")
def keys_list(as_json: Json = False, file: KeyFile = DEFAULT_FILE) -> None:
    """List the keys, without their secrets."""
    from flambeau.cli.output import print_json, print_table
    from flambeau.frontend.key_file import kind_of, to_instant

    rows = [
        [name, kind_of(name, key), to_instant(key.expires_at) if key.expires_at else "never", f"{key.secret[:4]}…"]
        for name, key in load(file).items()
    ]
    if as_json:
        print_json([dict(zip(("name", "api", "expires", "begins"), row, strict=True)) for row in rows])
    else:
        print_table(["NAME", "API", "EXPIRES", "KEY"], rows)


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
