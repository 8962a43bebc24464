"""Downloader: downloads archives from allowed URLs into the model store."""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import re
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urljoin
from uuid import uuid4

from flambeau.errors import DownloadFailed, FileTaken
from flambeau.logs.line_formats import printable
from flambeau.serving.model_sources.aws_signature import Credentials, signed_headers
from flambeau.serving.model_sources.urls import (
    WebAddress,
    file_name_of,
    is_allowed,
    is_public,
    local_path_of,
    parse_web_url,
)

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
REDIRECTS = (301, 302, 303, 307, 308)
PROGRESS_S = 5.0
PART = ".part"


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadLimits:
    """How large and how slow a download may be."""

    max_bytes: int = 200 << 30
    max_redirects: int = 5
    connect_s: float = 10
    silence_s: float = 30
    total_s: float = 3600


DEFAULT_LIMITS = DownloadLimits()


class DownloadRejected(Exception):
    """Why a download is rejected or aborted. The text is for the log and for trusted callers."""


class Downloader:
    """Downloads archives in threads. A URL that is not allowed is not even resolved."""

    def __init__(
        self, allowed: Sequence[re.Pattern[str]], *, allow_private: bool, limits: DownloadLimits = DEFAULT_LIMITS
    ) -> None:
        self.allowed = allowed
        self.allow_private = allow_private
        self.limits = limits

    def allows(self, url: str) -> bool:
        """Whether `allowed_urls` allows this URL; a rejection is logged with its remedy."""
        if is_allowed(url, self.allowed):
            return True
        logger.warning("%s matches no expression of allowed_urls; add one to allow it", shown(url))
        return False

    async def download(self, url: str, folder: Path, *, signed: bool = False) -> Path:
        """Download an allowed URL into a folder; an existing file of its name is never overwritten."""
        download = Download(self, url, folder, signed=signed)
        try:
            return await asyncio.to_thread(download.run)
        except asyncio.CancelledError:
            download.cancel()
            raise


class Download:
    """One download, from the look-up of its host to the file in the store."""

    def __init__(self, downloader: Downloader, url: str, folder: Path, *, signed: bool) -> None:
        self._downloader = downloader
        self._limits = downloader.limits
        self._url = url
        self._folder = folder
        self._signed = signed
        self._cancelled = threading.Event()
        self._socket: socket.socket | None = None
        self._deadline = time.monotonic() + downloader.limits.total_s

    def cancel(self) -> None:
        """Abort the download, from another thread."""
        self._cancelled.set()
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def run(self) -> Path:
        """Download in this thread."""
        name = file_name_of(self._url)
        target = self._folder / name
        part = self._folder / f".{name[:100]}.{uuid4().hex}{PART}"
        try:
            if not name:
                raise DownloadRejected("it names no file; it must end in the name of an archive")
            if os.path.lexists(target):
                raise FileTaken(name)
            with part.open("xb") as file:
                self._write(file)
            self._publish(part, target)
        except (DownloadRejected, OSError, ValueError, http.client.HTTPException) as error:
            logger.error(
                "%s could not be downloaded: %s", shown(self._url), printable(str(error)) or type(error).__name__
            )
            raise DownloadFailed(self._url, cause=str(error)) from None
        finally:
            part.unlink(missing_ok=True)
        logger.info("downloaded %s as %s", shown(self._url), target)
        return target

    @staticmethod
    def _publish(part: Path, target: Path) -> None:
        """Give the finished file its name, unless that was taken meanwhile."""
        try:
            os.link(part, target)
        except FileExistsError:
            raise FileTaken(target.name) from None
        except OSError:  # a file system without links
            if os.path.lexists(target):
                raise FileTaken(target.name) from None
            part.rename(target)

    def _write(self, file: BinaryIO) -> None:
        if self._url.lower().startswith("file:"):
            source = local_path_of(self._url)
            if not source.is_file():
                raise DownloadRejected(f"{source} is not a file")
            with source.open("rb") as content:
                self._copy(content, file, source.stat().st_size)
        else:
            self._write_response(file)

    def _write_response(self, file: BinaryIO) -> None:
        url, first_host = self._url, parse_web_url(self._url).netloc
        for _ in range(self._limits.max_redirects + 1):
            address = parse_web_url(url)
            headers = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "flambeau"}
            if self._signed and address.netloc == first_host:
                credentials = Credentials.from_environment(os.environ)
                headers |= signed_headers(address, credentials, datetime.now(UTC))
            connection = self._connect(address)
            with closing(connection):
                connection.request("GET", address.target, headers=headers)
                with closing(connection.getresponse()) as response:
                    if response.status not in REDIRECTS:
                        self._take(response, address, file)
                        return
                    url = self._next_url(url, response.headers.get("location"))
        raise DownloadRejected(f"it was redirected more than {self._limits.max_redirects} times")

    def _take(self, response: http.client.HTTPResponse, address: WebAddress, file: BinaryIO) -> None:
        if response.status != 200:
            raise DownloadRejected(f"{address.netloc} answered {response.status} {response.reason}")
        length = response.headers.get("content-length", "")
        self._copy(response, file, int(length) if length.isdigit() else None)

    def _next_url(self, url: str, location: str | None) -> str:
        """The target of a redirect; it must be an allowed URL and must not leave TLS."""
        if not location:
            raise DownloadRejected("it was redirected without a target")
        target = urljoin(url, location)
        if not is_allowed(target, self._downloader.allowed):
            raise DownloadRejected(f"it was redirected to {target[:200]}, which matches no expression of allowed_urls")
        if url.lower().startswith("https:") and not target.lower().startswith("https:"):
            raise DownloadRejected(f"it was redirected from https to {target[:200]}")
        return target

    def _connect(self, address: WebAddress) -> http.client.HTTPConnection:
        """Connect to an address that was resolved once and checked: a second look-up could return another."""
        connection = http.client.HTTPConnection(address.host, address.port, timeout=self._limits.silence_s)
        sock = self._open(address)
        self._socket = sock
        if self._cancelled.is_set():
            sock.close()
            raise DownloadRejected("it was cancelled")
        if address.is_tls:
            self._socket = sock = ssl.create_default_context().wrap_socket(sock, server_hostname=address.host)
            connection.default_port = 443  # so that the Host header does not name it
        connection.sock = sock
        return connection

    def _open(self, address: WebAddress) -> socket.socket:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        reachable = [one for one in found if self._downloader.allow_private or is_public(str(one[4][0]))]
        if not reachable:
            raise DownloadRejected(f"{address.host} is not a public address; allow_private_urls would allow it")
        error: OSError | None = None
        for family, kind, protocol, _, where in reachable:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(self._limits.connect_s)
                sock.connect(where)
                sock.settimeout(self._limits.silence_s)
                return sock
            except OSError as problem:
                sock.close()
                error = problem
        assert error is not None
        raise error

    def _copy(self, source: BinaryIO | http.client.HTTPResponse, file: BinaryIO, size: int | None) -> None:
        """Copy all bytes, within the limits."""
        self._check_size(size or 0)
        if size is not None and size > shutil.disk_usage(self._folder).free:
            raise DownloadRejected(f"its {size} bytes do not fit on the disk of {self._folder}")
        copied, logged_at = 0, time.monotonic()
        while chunk := source.read(CHUNK_BYTES):
            copied += len(chunk)
            self._check_size(copied)
            file.write(chunk)
            now = time.monotonic()
            if self._cancelled.is_set():
                raise DownloadRejected("it was cancelled")
            if now > self._deadline:
                raise DownloadRejected(f"it took longer than {self._limits.total_s:g} s")
            if now - logged_at > PROGRESS_S:
                logged_at = now
                of = f" of {size >> 20}" if size else ""
                logger.info("downloading %s: %d%s MB", shown(self._url), copied >> 20, of)
        if size is not None and copied != size:
            raise DownloadRejected(f"it ended after {copied} of {size} bytes")

    def _check_size(self, size: int) -> None:
        if size > self._limits.max_bytes:
            raise DownloadRejected(f"it is larger than {self._limits.max_bytes} bytes")


def shown(url: str) -> str:
    """A URL for the log, without its query, which may hold a signature."""
    return printable(url.partition("?")[0][:500])


def sweep_parts(folder: Path) -> None:
    """Delete the leftovers of killed downloads: partial files that have not grown for an hour."""
    long_ago = time.time() - DEFAULT_LIMITS.total_s
    for part in folder.glob(f".*{PART}"):
        with suppress(OSError):
            if part.stat().st_mtime < long_ago:
                part.unlink()
