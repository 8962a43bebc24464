"""Client: calls a running server from ordinary code and threads."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self

from flambeau.client import calls
from flambeau.client.calls import Call, Health, Message
from flambeau.client.client_settings import ClientSettings
from flambeau.client.event_streams import EVENTS, StreamReader
from flambeau.client.replies import Result, as_whole, error_of, read_as, retry_delay_s
from flambeau.client.sessions import ClientSession, upgrade
from flambeau.client.socket_pool import SocketPool
from flambeau.client.transport import MAX_RESPONSE_BYTES
from flambeau.errors import ClientError
from flambeau.http_client import HttpReply

POLL_S = 0.05


class Client:
    """Calls a server. Threads may share one; `with` or `close` closes its connections.

    Without arguments: FLAMBEAU_URL or http://127.0.0.1:8080, with the key in FLAMBEAU_KEY or in ./key_file.json.
    An error of the server raises ApiError; no server, NoConnection; no answer within `timeout_s`, CallTimedOut. With
    `retries`, a call that the server is too busy to begin (429 or 503 with Retry-After) is sent again.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        management_url: str | None = None,
        key: str | None = None,
        management_key: str | None = None,
        key_file: str | os.PathLike[str] | None = None,
        timeout_s: float | None = 60,
        retries: int = 0,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        settings = ClientSettings.read(
            url, management_url, key, management_key, key_file, timeout_s, retries, max_response_bytes
        )
        self._settings = settings
        self._tls = tls
        self._inference = self._new_pool(settings.url)
        self._management = self._new_pool(settings.management_url) if settings.management_url else None
        self.models = ClientModels(self)

    @property
    def url(self) -> str:
        return self._settings.url

    # ---- models ----

    def predict(
        self,
        model: str,
        data: Any = b"",
        *,
        version: str | None = None,
        content_type: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """A model's answer to bytes, a text or a value of JSON: a value if it is JSON, else text or bytes."""
        return self.call(calls.prediction(model, data, version, content_type, headers), timeout_s)

    def stream(
        self,
        model: str,
        data: Any = b"",
        *,
        version: str | None = None,
        content_type: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[str | bytes]:
        """The parts of a model's answer as they arrive; `timeout_s` is for each of them."""
        call = calls.prediction(model, data, version, content_type, {"accept": EVENTS, **(headers or {})})
        with closing(self._stream(call, timeout_s)) as received:
            for reader, chunk in received:
                yield from reader.parts(chunk)

    def session(
        self,
        model: str,
        *,
        version: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ClientSession:
        """A WebSocket to a model, for messages in both directions."""
        wait_s = self._settings.timeout_s if timeout_s is None else timeout_s
        call, key = upgrade(model, version, headers)
        connection = self._inference.take(self._deadline(timeout_s))
        return ClientSession.open(connection, call, self._settings.keys, key, wait_s)

    def generate(self, prompt: str, *, model: str | None = None, timeout_s: float | None = None, **options: Any) -> str:
        """The text that a language model adds to a prompt; the options are those of /v1/completions."""
        return self.call(calls.completion(prompt, model, options), timeout_s)

    def stream_generate(
        self, prompt: str, *, model: str | None = None, timeout_s: float | None = None, **options: Any
    ) -> Iterator[str]:
        """`generate` in pieces, as they are made."""
        with closing(self._stream(calls.completion(prompt, model, {**options, "stream": True}), timeout_s)) as received:
            for reader, chunk in received:
                yield from reader.texts(chunk, calls.completion_text)

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> str:
        """The reply of a language model; a text is one message of the user."""
        return self.call(calls.chat(messages, model, options), timeout_s)

    def stream_chat(
        self,
        messages: str | Sequence[Message],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """`chat` in pieces, as they are made."""
        with closing(self._stream(calls.chat(messages, model, {**options, "stream": True}), timeout_s)) as received:
            for reader, chunk in received:
                yield from reader.texts(chunk, calls.chat_text)

    # ---- the server ----

    def health(self, *, timeout_s: float | None = None) -> Health:
        """Whether every model can answer."""
        return read_as(calls.health_of, self._send(calls.health(), timeout_s))

    def wait_ready(self, timeout_s: float = 60) -> None:
        """Wait until every model can answer; raises CallTimedOut with the reason if it takes longer."""
        deadline = time.monotonic() + timeout_s
        found, reason = None, ""
        while time.monotonic() < deadline:
            try:
                found = self.health(timeout_s=deadline - time.monotonic())
                if found.is_ready:
                    return
            except ClientError as error:
                reason = str(error)
            time.sleep(POLL_S)
        raise calls.not_ready(found, reason, timeout_s)

    def call(self, call: Call[Result], timeout_s: float | None = None) -> Result:
        """Send a call and read its answer; the clients' methods build calls."""
        return call.result(self._send(call, timeout_s))

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> HttpReply:
        """Send any request to the inference API and return its response, whatever its status."""
        return self._send(Call(method=method, path=path, read=as_whole, body=body, headers=headers or {}), timeout_s)

    def close(self) -> None:
        self._inference.close()
        if self._management is not None:
            self._management.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- input and output ----

    def _send(self, call: Call[Any], timeout_s: float | None) -> HttpReply:
        deadline = self._deadline(timeout_s)
        pool, request = self._pool(call, deadline), call.request(self._settings.keys)
        for attempt in range(self._settings.retries + 1):
            connection = pool.take(deadline)
            try:
                connection.send(request, deadline)
                reply = connection.read_whole(deadline)
            except BaseException:
                connection.close()
                raise
            pool.give_back(connection)
            delay_s = retry_delay_s(reply, attempt, self._settings.retries)
            if delay_s is None or (deadline is not None and time.monotonic() + delay_s >= deadline):
                break
            time.sleep(delay_s)
        return reply

    def _stream(self, call: Call[Any], timeout_s: float | None) -> Generator[tuple[StreamReader, bytes], None, None]:
        deadline = self._deadline(timeout_s)
        pool = self._pool(call, deadline)
        connection = pool.take(deadline)
        try:
            connection.send(call.request(self._settings.keys), deadline)
            head = connection.read_head(deadline)
            if not 200 <= head.status < 300:
                raise error_of(connection.read_whole(deadline))
            reader = StreamReader(head, self._settings.max_response_bytes)
            while data := connection.read(self._deadline(timeout_s)):
                yield reader, data
        finally:
            pool.give_back(connection)  # one that is not at its end is closed, which cancels the request

    def _pool(self, call: Call[Any], deadline: float | None) -> SocketPool:
        if call.api == "inference":
            return self._inference
        if self._management is None:
            connection = self._inference.take(deadline)
            try:
                connection.send(calls.root().request(self._settings.keys), deadline)
                reply = connection.read_whole(deadline)
            except BaseException:
                connection.close()
                raise
            self._inference.give_back(connection)
            self._management = self._new_pool(calls.management_url_of(reply, self._settings.url))
        return self._management

    def _new_pool(self, url: str) -> SocketPool:
        return SocketPool(url, self._tls, self._settings.max_response_bytes)

    def _deadline(self, timeout_s: float | None) -> float | None:
        seconds = self._settings.timeout_s if timeout_s is None else timeout_s
        return None if seconds is None else time.monotonic() + seconds


class ClientModels:
    """The models of a server: its management API."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def list(self) -> list[dict[str, Any]]:
        """The name and the source of each model."""
        found: list[dict[str, Any]] = []
        token: str | None = None
        tokens: set[str] = set()
        while True:
            call = calls.management("GET", "/models", calls.page_of, next_page_token=token)
            page, token = self._client.call(call)
            found += page
            if token is None:
                return found
            calls.note_page(tokens, page, token)

    def describe(self, name: str, version: str | None = None) -> dict[str, Any]:
        """Settings, workers and their last failures."""
        return self._client.call(calls.management("GET", calls.path_of("models", name, version), calls.first_of))

    def register(
        self,
        source: str,
        *,
        name: str | None = None,
        handler: str | None = None,
        workers: int = 1,
        batch_size: int | None = None,
        max_batch_delay_ms: int | None = None,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> str:
        """Register a file or folder of the model store, or an allowed URL; returns what was done, in words."""
        return self._client.call(
            calls.registration(source, name, handler, workers, batch_size, max_batch_delay_ms, wait), timeout_s
        )

    def scale(
        self,
        name: str,
        workers: int,
        *,
        version: str | None = None,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> str:
        """Change the number of workers."""
        return self._client.call(calls.scaling(name, version, workers, wait), timeout_s)

    def set_default(self, name: str, version: str) -> str:
        """Choose the version for requests that name none."""
        path = calls.path_of("models", name, version, "set-default")
        return self._client.call(calls.management("PUT", path, calls.status_of))

    def set_traffic(
        self,
        name: str,
        version: str,
        percent: int | None = None,
        *,
        mirror: int | None = None,
        max_errors: int | None = None,
    ) -> str:
        """Give a version a percentage of the requests that name none, the default version has the others; or copies of
        a percentage (`mirror`), whose answers are only compared. It gets no more once more than `max_errors` percent
        of its answers are errors of the server.
        """
        path = calls.path_of("models", name, version, "traffic")
        shares = {"percent": percent, "mirror": mirror, "max_errors": max_errors}
        call = calls.management("PUT", path, calls.status_of, **shares)
        return self._client.call(call)

    def unregister(self, name: str, version: str | None = None) -> str:
        """Remove a model after it has answered the requests it accepted."""
        path = calls.path_of("models", name, version)
        return self._client.call(calls.management("DELETE", path, calls.status_of))
