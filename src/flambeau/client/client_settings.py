"""ClientSettings: where a client sends its calls and with which keys, from arguments, variables and the key file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flambeau.client.transport import MAX_RESPONSE_BYTES, ServerAddress
from flambeau.errors import ConfigError
from flambeau.small_files import read_small

Api = Literal["inference", "management"]

DEFAULT_URL, DEFAULT_MANAGEMENT_URL = "http://127.0.0.1:8080", "http://127.0.0.1:8081"
KEY_FILE = "key_file.json"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Where a client sends its calls, and with which keys."""

    url: str
    management_url: str | None  # None: as the server's description at / says
    keys: Mapping[Api, str]
    timeout_s: float | None
    retries: int
    max_response_bytes: int

    @classmethod
    def read(
        cls,
        url: str | None,
        management_url: str | None,
        key: str | None,
        management_key: str | None,
        key_file: str | os.PathLike[str] | None,
        timeout_s: float | None,
        retries: int,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        environment: Mapping[str, str] = os.environ,
    ) -> ClientSettings:
        """The arguments, else the environment, else the defaults of `flambeau serve`."""
        given = url or environment.get("FLAMBEAU_URL")
        managed = management_url or environment.get("FLAMBEAU_MANAGEMENT_URL")
        if given is None and managed is None:
            managed = DEFAULT_MANAGEMENT_URL
        address = ServerAddress.parse(given or DEFAULT_URL)
        file = key_file or environment.get("FLAMBEAU_KEY_FILE")
        # A key found by chance is sent only to this machine.
        nearby = Path(KEY_FILE) if address.path or address.host in LOOPBACK else None
        stored = read_key_file(Path(file), must_exist=True) if file else read_key_file(nearby) if nearby else {}
        both = key or environment.get("FLAMBEAU_KEY")
        chosen: dict[Api, str | None] = {
            "inference": both or environment.get("FLAMBEAU_INFERENCE_KEY") or stored.get("inference"),
            "management": management_key
            or both
            or environment.get("FLAMBEAU_MANAGEMENT_KEY")
            or stored.get("management"),
        }
        keys = {api: value for api, value in chosen.items() if value}
        for value in keys.values():
            check_key(value)
        if retries < 0:
            raise ConfigError(f"retries is {retries}; it must be 0 or more")
        if max_response_bytes < 1:
            raise ConfigError(f"max_response_bytes is {max_response_bytes}; it must be 1 or more")
        return cls(
            url=given or DEFAULT_URL,
            management_url=managed,
            keys=keys,
            timeout_s=timeout_s,
            retries=retries,
            max_response_bytes=max_response_bytes,
        )


def read_key_file(file: Path, *, must_exist: bool = False) -> dict[str, str]:
    """The keys that a server has written, by API."""
    try:
        document = json.loads(read_small(file))
        return {kind: entry["key"] for kind, entry in document.items() if isinstance(entry.get("key"), str)}
    except OSError as error:
        if must_exist:
            raise ConfigError(f"the key file {file} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError):
        if must_exist:
            raise ConfigError(f"{file} is not a key file; give the key_file.json of the server") from None
    return {}


def check_key(key: str) -> None:
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError("the key has characters that a header cannot carry; copy it from the key file")
