"""ResponsesApi: /v1/responses, and their description."""

from __future__ import annotations

import time
from functools import partial

from flambeau.errors import InvalidField
from flambeau.frontend.http.bodies import take_bytes
from flambeau.frontend.http.errors import JSON_TYPE, openai_error_body, respond_json
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.openapi import OPENAI_ERROR, Operation
from flambeau.frontend.openai.api import operation
from flambeau.frontend.openai.chat import generation_of, writer_of
from flambeau.frontend.openai.chat_translation import client_names
from flambeau.frontend.openai.errors import not_allowed, not_found
from flambeau.frontend.openai.models import choose_generator
from flambeau.frontend.openai.priorities import apply_priority
from flambeau.frontend.openai.requests import Object, read_request
from flambeau.frontend.openai.responses import ResponseHead, Work, generate
from flambeau.frontend.openai_responses.requests import CLIENT_NAMES, ResponsesRequest, items_of, messages_of, to_chat
from flambeau.frontend.openai_responses.store import ResponseStore, StoredResponse
from flambeau.frontend.openai_responses.writer import ResponseObjectWriter, new_id
from flambeau.serving.server import Server

OPERATIONS = [
    operation("/v1/responses", "createResponse", "Answer an input (OpenAI).", ResponsesRequest),
    *(
        Operation(
            path=path, method=method, id=operation_id, summary=summary, errors=(400, 401, 404), error=OPENAI_ERROR
        )
        for method, path, operation_id, summary in (
            ("get", "/v1/responses/{response_id}", "getResponse", "A stored response (OpenAI)."),
            ("delete", "/v1/responses/{response_id}", "deleteResponse", "Delete a stored response (OpenAI)."),
            ("get", "/v1/responses/{response_id}/input_items", "listInputItems", "The input of a response (OpenAI)."),
        )
    ),
]
MAX_SHOWN = 100
FORGOTTEN = "responses are kept for an hour, by the key that made them, and not beyond a restart"


class ResponsesApi:
    """Creates responses; those that are stored can be read, continued and deleted for a while."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._store = ResponseStore()

    def v1(self, exchange: Exchange, segments: list[str]) -> Work:
        """/v1/responses, /v1/responses/{id} and /v1/responses/{id}/input_items."""
        below, method = segments[2:], exchange.method
        if method == "OPTIONS":
            exchange.respond(200, b"")  # every response has the CORS headers
        elif not below:
            if method == "POST":
                return self._create(exchange)
            not_allowed(exchange, "POST")
        elif below[1:] == ["input_items"]:
            if method == "GET":
                self._list_items(exchange, below[0])
            else:
                not_allowed(exchange, "GET")
        elif len(below) > 1:
            not_found(exchange)
        elif method == "GET":
            if (stored := self._find(exchange, below[0])) is not None:
                exchange.respond(200, stored.document + b"\n", (JSON_TYPE,))
        elif method == "DELETE":
            self._delete(exchange, below[0])
        else:
            not_allowed(exchange, "GET", "DELETE")
        return None

    def _create(self, exchange: Exchange) -> Work:
        server = self._server
        request = read_request(take_bytes(exchange), ResponsesRequest)
        apply_priority(exchange, request.priority)
        items = items_of(request)
        messages = [*self._earlier(request, exchange.key_name), *messages_of(items)]
        if not messages:
            raise InvalidField("input", "input must not be empty; send a text or a list of items")
        chat = to_chat(request, messages)
        with client_names(CLIENT_NAMES):
            generation = generation_of(chat)
        model, version, generation = choose_generator(server.registry, exchange, request.model, "chat", generation)
        head = ResponseHead.new("chatcmpl-", model, request.model)
        keep = partial(self._keep, exchange.key_name, items, messages) if request.is_stored else None
        writer = ResponseObjectWriter(writer_of(chat, head), request, keep)
        return generate(server, exchange, model, version, generation, writer)

    def _earlier(self, request: ResponsesRequest, owner: str) -> list[Object]:
        """The conversation that a request continues."""
        id = request.previous_response_id
        if id is None:
            return []
        stored = self._store.get(id, owner, time.monotonic())
        if stored is None:
            text = f"previous_response_id {id[:MAX_SHOWN]!r} is not known: {FORGOTTEN}. Send the whole input instead."
            raise InvalidField("previous_response_id", text)
        return stored.conversation()

    def _keep(self, owner: str, items: list[Object], messages: list[Object], response: Object, answer: Object) -> None:
        with_ids = [{"id": new_id("msg"), **item} for item in items]
        self._store.put(response["id"], owner, response, with_ids, [*messages, answer], time.monotonic())

    def _find(self, exchange: Exchange, id: str) -> StoredResponse | None:
        """A stored response; without one, respond 404."""
        stored = self._store.get(id, exchange.key_name, time.monotonic())
        if stored is None:
            text = f"There is no response {id[:MAX_SHOWN]!r}: {FORGOTTEN}."
            exchange.respond(404, openai_error_body(404, text), (JSON_TYPE,))
        return stored

    def _list_items(self, exchange: Exchange, id: str) -> None:
        if (stored := self._find(exchange, id)) is not None:
            items = [*reversed(stored.items())]  # the newest first, as OpenAI lists them
            ids = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": "", "last_id": ""}
            respond_json(exchange, 200, {"object": "list", "data": items, **ids, "has_more": False})

    def _delete(self, exchange: Exchange, id: str) -> None:
        if self._find(exchange, id) is not None:
            self._store.delete(id, exchange.key_name, time.monotonic())
            respond_json(exchange, 200, {"id": id, "object": "response", "deleted": True})
