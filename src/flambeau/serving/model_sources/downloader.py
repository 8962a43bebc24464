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
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urljoin
from uuid import uuid4

from flambeau.errors import DownloadFailed, FileTaken
from flambeau.logs.line_formats import printable
from flambeau.serving.model_sources.aws_signature import Credentials, signed_headers
from flambeau.serving.model_sources.urls import (
    WebAddress,
    canonical,
    file_name_of,
    has_authority,
    is_allowed,
    is_public,
    local_path_of,
    parse_web_url,
    readings_of,
)

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
REDIRECTS = (301, 302, 303, 307, 308)
PROGRESS_S = 5.0
PART = ".part"
MAX_TOGETHER = 16  # downloads; others wait
GRACE_S = 1.0  # for the thread of a cancelled download; a look-up of a host cannot be interrupted
RATE_WINDOW_S = 30.0
STOPPING = "the server is stopping"


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadLimits:
    """How large and how slow a download may be."""

    max_bytes: int = 200 << 30
    max_redirects: int = 5
    connect_s: float = 10
    silence_s: float = 30
    total_s: float = 3600
    min_rate: float = 10_000  # bytes per second, on average over `window_s`; 0: any
    window_s: float = RATE_WINDOW_S


DEFAULT_LIMITS = DownloadLimits()
IMAGE_LIMITS = DownloadLimits(max_bytes=20 << 20, connect_s=5, silence_s=10, total_s=30, min_rate=0)
VIDEO_LIMITS = DownloadLimits(max_bytes=100 << 20, connect_s=5, silence_s=10, total_s=60, min_rate=0)
FILE_LIMITS = {"image": IMAGE_LIMITS, "video": VIDEO_LIMITS, "sound": IMAGE_LIMITS}  # in chats


class DownloadRejected(Exception):
    """Why a download is rejected or aborted. The text is for the log and for trusted callers."""


class RateMeter:
    """Whether bytes arrive at the least rate, on average over a window."""

    def __init__(self, min_rate: float, window_s: float, now: float) -> None:
        self._min_rate = min_rate
        self._window_s = window_s
        self._counts = deque([(now, 0)])  # the first is the last one before the window

    def is_slow(self, num_bytes: int, now: float) -> bool:
        """Note how many bytes there are now."""
        self._counts.append((now, num_bytes))
        while len(self._counts) > 1 and self._counts[1][0] <= now - self._window_s:
            self._counts.popleft()
        begin, before = self._counts[0]
        return now - begin >= self._window_s and num_bytes - before < self._min_rate * (now - begin)


class Downloader:
    """Downloads archives in threads of their own. A URL that is not allowed is not even resolved."""

    def __init__(
        self, allowed: Sequence[re.Pattern[str]], *, allow_private: bool, limits: DownloadLimits = DEFAULT_LIMITS
    ) -> None:
        self.allowed = allowed
        self.allow_private = allow_private
        self.limits = limits
        self._slots = asyncio.Semaphore(MAX_TOGETHER)
        self._running: dict[Download, Future[Path]] = {}
        self._is_closed = False

    def allows(self, url: str) -> bool:
        """Whether `allowed_urls` allows this URL; a rejection is logged with its remedy.

        Raises DownloadFailed for a URL that is allowed as it is written, but whose host or port is none.
        """
        try:
            if self.allows_all(readings_of(canonical(url))):
                return True
            remedy = "it matches no expression of allowed_urls; add one to allow it"
        except ValueError as error:
            remedy = str(error)
            if not has_authority(url) and is_allowed(url, self.allowed):
                logger.error("%s could not be downloaded: %s", shown(url), printable(remedy))
                raise DownloadFailed(url, cause=remedy) from None
        logger.warning("%s is rejected: %s", shown(url), remedy)
        return False

    def allows_all(self, readings: Sequence[str]) -> bool:
        return all(is_allowed(reading, self.allowed) for reading in readings)

    @property
    def running(self) -> list[Download]:
        """The downloads that have not ended."""
        return [*self._running]

    async def download(self, url: str, folder: Path, *, signed: bool = False) -> Path:
        """Download an allowed URL into a folder; an existing file of its name is never overwritten."""
        async with self._slots:
            if self._is_closed:
                raise DownloadFailed(url, cause=STOPPING)
            download = Download(self, url, folder, signed=signed)
            # A daemon: a thread that cannot be interrupted must not keep the process from its end.
            future: Future[Path] = Future()
            threading.Thread(target=download.run_into, args=(future,), name="download", daemon=True).start()
            self._running[download] = future
            future.add_done_callback(lambda _: self._running.pop(download, None))
            try:
                return await self._watch(download, future)
            except BaseException:
                download.cancel("it was cancelled")
                raise

    async def _watch(self, download: Download, future: Future[Path]) -> Path:
        """Wait for the end of a download; abort one that is too slow."""
        limits, loop = self.limits, asyncio.get_running_loop()
        ended = asyncio.wrap_future(future)
        ended.add_done_callback(lambda one: one.cancelled() or one.exception())  # it may end when nobody waits for it
        meter, deadline = RateMeter(limits.min_rate, limits.window_s, loop.time()), loop.time() + limits.total_s
        while not download.cancelled_for:
            await asyncio.wait([ended], timeout=max(0.01, min(1.0, limits.window_s / 10, deadline - loop.time())))
            if ended.done():
                return ended.result()
            now = loop.time()
            if now > deadline:
                download.cancel(f"it took longer than {limits.total_s:g} s")
            elif meter.is_slow(download.num_bytes, now):
                download.cancel(f"it was slower than {limits.min_rate:g} bytes/s for {limits.window_s:g} s")
        await asyncio.wait([ended], timeout=GRACE_S)
        if ended.done():
            return ended.result()
        raise DownloadFailed(download.url, cause=download.cancelled_for)

    def stop(self) -> None:
        """Abort all downloads; new ones are rejected."""
        self._is_closed = True
        for download in [*self._running]:
            download.cancel(STOPPING)

    async def close(self) -> None:
        """Abort all downloads and delete their partial files."""
        self.stop()
        left = dict(self._running)
        if left:
            await asyncio.wait([asyncio.wrap_future(future) for future in left.values()], timeout=GRACE_S)
        for download in left:
            download.part.unlink(missing_ok=True)


class Download:
    """One download, from the look-up of its host to the file in the store."""

    def __init__(self, downloader: Downloader, url: str, folder: Path, *, signed: bool) -> None:
        self.url = url
        self.part = folder / f".{uuid4().hex}{PART}"
        self.num_bytes = 0  # received so far
        self.size_bytes: int | None = None  # of all, once it is known
        self.cancelled_for = ""  # the reason, if it was cancelled
        self._downloader = downloader
        self._limits = downloader.limits
        self._folder = folder
        self._signed = signed
        self._socket: socket.socket | None = None

    def cancel(self, reason: str) -> None:
        """Abort the download, from another thread."""
        self.cancelled_for = self.cancelled_for or reason
        if (sock := self._socket) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def run_into(self, future: Future[Path]) -> None:
        """Download in this thread; the future gets the file, or the error."""
        try:
            future.set_result(self.run())
        except BaseException as error:
            future.set_exception(error)

    def run(self) -> Path:
        """Download in this thread."""
        part = self.part
        try:
            url = canonical(self.url)
            name = file_name_of(url)
            target = self._folder / name
            if not name:
                raise DownloadRejected("it names no file; it must end in the name of an archive")
            if os.path.lexists(target):
                raise FileTaken(name)
            with part.open("xb") as file:
                self._write(url, file)
            self._check_cancelled()
            publish(part, target)
        except (DownloadRejected, OSError, ValueError, http.client.HTTPException) as error:
            # A cancelled download fails at its closed socket; the reason says more.
            cause = self.cancelled_for or str(error)
            logger.error("%s could not be downloaded: %s", shown(self.url), printable(cause) or type(error).__name__)
            raise DownloadFailed(self.url, cause=cause) from None
        finally:
            part.unlink(missing_ok=True)
        logger.info("downloaded %s as %s", shown(self.url), target)
        return target

    def _check_cancelled(self) -> None:
        if self.cancelled_for:
            raise DownloadRejected(self.cancelled_for)

    def _write(self, url: str, file: BinaryIO) -> None:
        if url.startswith("file:"):
            source = local_path_of(url)
            if not source.is_file():
                raise DownloadRejected(f"{source} is not a file")
            with source.open("rb") as content:
                self._copy(content, file, source.stat().st_size)
        else:
            self._write_response(url, file)

    def _write_response(self, url: str, file: BinaryIO) -> None:
        first_host = parse_web_url(url).netloc
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
        target = canonical(urljoin(url, location))
        if not self._downloader.allows_all(readings_of(target)):
            raise DownloadRejected(f"it was redirected to {target[:200]}, which matches no expression of allowed_urls")
        if url.lower().startswith("https:") and not target.lower().startswith("https:"):
            raise DownloadRejected(f"it was redirected from https to {target[:200]}")
        return target

    def _connect(self, address: WebAddress) -> http.client.HTTPConnection:
        """Connect to an address that was resolved once and checked: a second look-up could return another."""
        connection = http.client.HTTPConnection(address.host, address.port, timeout=self._limits.silence_s)
        sock = self._open(address)
        self._socket = sock
        if self.cancelled_for:
            sock.close()
            self._check_cancelled()
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

    def _copy(self, source: BufferedReader | http.client.HTTPResponse, file: BinaryIO, size: int | None) -> None:
        """Copy all bytes, within the limits."""
        self.size_bytes = size
        self._check_size(size or 0)
        if size is not None and size > shutil.disk_usage(self._folder).free:
            raise DownloadRejected(f"its {size} bytes do not fit on the disk of {self._folder}")
        logged_at = time.monotonic()
        while chunk := source.read1(CHUNK_BYTES):  # what has arrived: read() waits for all of a chunk
            self.num_bytes += len(chunk)
            self._check_size(self.num_bytes)
            file.write(chunk)
            self._check_cancelled()
            now = time.monotonic()
            if now - logged_at > PROGRESS_S:
                logged_at = now
                of = f" of {size >> 20}" if size else ""
                logger.info("downloading %s: %d%s MB", shown(self.url), self.num_bytes >> 20, of)
        if size is not None and self.num_bytes != size:
            raise DownloadRejected(f"it ended after {self.num_bytes} of {size} bytes")

    def _check_size(self, size: int) -> None:
        if size > self._limits.max_bytes:
            raise DownloadRejected(f"it is larger than {self._limits.max_bytes} bytes")


def publish(part: Path, target: Path) -> None:
    """Give a finished file its name, unless that was taken meanwhile."""
    try:
        os.link(part, target)
    except FileExistsError:
        raise FileTaken(target.name) from None
    except OSError:  # a file system without links
        if os.path.lexists(target):
            raise FileTaken(target.name) from None
        part.rename(target)


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
