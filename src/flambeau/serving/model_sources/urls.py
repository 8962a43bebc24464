"""Which URLs models may come from, and which addresses they may resolve to. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from flambeau.errors import ConfigError

SCHEMES = ("http://", "https://", "file://")
# Globally routable by number, but reachable only inside a cloud, where they reveal secrets: Azure and Oracle metadata.
_METADATA = (ipaddress.ip_network("168.63.129.16/32"), ipaddress.ip_network("192.0.0.0/24"))
# Not public, though Python takes them for global: site-local and documentation addresses.
_UNASSIGNED = (ipaddress.ip_network("fec0::/10"), ipaddress.ip_network("3fff::/20"))
HUB_NAME = re.compile(r"(?P<repo>\w[\w.-]{0,95}/\w[\w.-]{0,95})(@(?P<revision>[\w./-]{1,200}))?")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

# Characters that mean the same encoded or not (RFC 3986, 2.3).
_UNRESERVED = re.compile("%(2[dDeE]|3[0-9]|[46][1-9a-fA-F]|[57][0-9aA]|5[fF]|7[eE])")
_MAX_DECODINGS = 5
MAX_URL = 8192  # characters

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True, kw_only=True)
class WebAddress:
    """The parts of an http or https URL."""

    host: str
    port: int
    is_tls: bool
    path: str
    query: str

    @property
    def target(self) -> str:
        """Path and query, as the request line has them."""
        return f"{self.path}?{self.query}" if self.query else self.path

    @property
    def netloc(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


def is_hub_name(text: str) -> bool:
    """Whether a text may be `org/name` or `org/name@revision` of the Hugging Face hub."""
    return HUB_NAME.fullmatch(text) is not None and not text.endswith((".mar", ".py"))


def is_url(text: str) -> bool:
    """Whether a registration names a URL rather than a file in the store."""
    return text.lower().startswith(SCHEMES)


def compile_patterns(patterns: Iterable[str]) -> list[re.Pattern[str]]:
    """Compile the expressions of `allowed_urls`."""
    try:
        return [re.compile(pattern, re.IGNORECASE) for pattern in patterns]
    except re.error as error:
        raise ConfigError(f"allowed_urls: {error.pattern!r} is not a regular expression: {error}") from None


def is_allowed(url: str, patterns: Sequence[re.Pattern[str]]) -> bool:
    """Whether the whole URL matches one of the patterns."""
    return any(pattern.fullmatch(url) for pattern in patterns)


def canonical(url: str) -> str:
    """The one spelling of a URL that is matched and fetched; raises ValueError for one that servers read differently.

    Scheme and host are in lower case, characters that need no encoding are decoded, and there is no fragment.
    """
    if len(url) > MAX_URL:
        raise ValueError(f"it has {len(url)} characters, more than {MAX_URL}")
    if any(character <= " " or character in '\\"<>\x7f' for character in url):
        raise ValueError("it holds a blank, a control character or a backslash")
    parts = urlsplit(url)
    if parts.scheme == "file" and "?" in url:
        raise ValueError("it is a file with a query")
    netloc = parts.netloc
    if parts.hostname and "@" not in netloc:  # a user name is rejected later
        host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode("ascii")
        host = f"[{host}]" if ":" in host else host
        netloc = host if parts.port is None else f"{host}:{parts.port}"
    path = parts.path
    if parts.scheme == "file" and not netloc:
        path = f"/{path.lstrip('/')}"  # `file:////srv` is written as `file:///` before an absolute path
    path = without_needless_codes(path)
    if "\0" in decoded(path) or has_dots(url):
        raise ValueError("its path holds . or .. or NUL")
    return urlunsplit((parts.scheme, netloc, path, parts.query, ""))


def without_needless_codes(path: str) -> str:
    """A path with the characters decoded that need no encoding; a code may be encoded itself."""
    for _ in range(_MAX_DECODINGS):
        if (once := _UNRESERVED.sub(lambda code: unquote(code[0]), path)) == path:
            return path
        path = once
    raise ValueError("its path is encoded several times")


def has_authority(url: str) -> bool:
    """Whether the host and the port of a URL can be read."""
    try:
        _ = urlsplit(url).port
    except ValueError:
        return False
    return True


def has_dots(url: str) -> bool:
    """Whether a URL's path has a `.` or `..` in it, however it is encoded; False for an invalid URL."""
    try:
        segments = re.split(r"[/\\]", decoded(urlsplit(url).path))
    except ValueError:
        return False
    return any(segment.partition(";")[0] in (".", "..") for segment in segments)


def decoded(path: str) -> str:
    """A path as a server reads it that decodes it again and again."""
    for _ in range(_MAX_DECODINGS):
        if (once := unquote(path)) == path:
            return path
        path = once
    raise ValueError("its path is encoded several times")


def readings_of(url: str) -> tuple[str, ...]:
    """The ways in which a server may read a canonical URL: as it stands, and with its path decoded."""
    parts = urlsplit(url)
    path = decoded(parts.path)
    return (url,) if path == parts.path else (url, urlunsplit(parts._replace(path=path)))


def file_name_of(url: str) -> str:
    """The last part of a URL's path, which names its file in the store; empty if it is not usable."""
    name = urlsplit(url).path.rpartition("/")[2]
    return "" if name.startswith(".") or not name.isprintable() else name


def local_path_of(url: str) -> Path:
    """The path of a file URL; raises ValueError with the reason if it is invalid."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"{parts.netloc!r} is another machine; write file:///path")
    if ".." in path or "\0" in path:
        raise ValueError("its path holds an encoded .. or NUL")
    return Path(path)


def parse_web_url(url: str) -> WebAddress:
    """Split an http or https URL; raises ValueError with the reason if it is ambiguous or not allowed."""
    if any(character <= " " or character in '\\"<>\x7f' for character in url):
        raise ValueError("it holds a blank, a control character or a backslash")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"its scheme is {parts.scheme!r}; it may be http or https")
    if "@" in parts.netloc:
        raise ValueError("it holds a user name; use a pre-signed URL instead")
    if not parts.hostname:
        raise ValueError("it names no host")
    host = parts.hostname.encode("idna").decode("ascii") if not parts.hostname.isascii() else parts.hostname
    is_tls = parts.scheme == "https"
    port = parts.port if parts.port is not None else 443 if is_tls else 80
    return WebAddress(host=host, port=port, is_tls=is_tls, path=parts.path or "/", query=parts.query)


def is_public(text: str) -> bool:
    """Whether an address is public, with every IPv4 address embedded in it."""
    return all(_is_global(one) for one in _stands_for(ipaddress.ip_address(text.partition("%")[0])))


def _is_global(address: Ip) -> bool:
    if address.is_multicast or address.is_unspecified or address.is_reserved:
        return False
    return address.is_global and not any(address in network for network in (*_METADATA, *_UNASSIGNED))


def _stands_for(address: Ip) -> list[Ip]:
    """An address and the IPv4 addresses embedded in it, to which a gateway would translate it."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address in _NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    within = (address.ipv4_mapped, address.sixtofour, *(address.teredo or ()))
    return [address, *(one for one in within if one is not None)]
