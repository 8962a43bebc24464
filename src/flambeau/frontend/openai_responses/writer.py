"""ResponseObjectWriter: writes a chat as a response of OpenAI's Responses API, whole or as typed events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flambeau.errors import FlambeauError
from flambeau.frontend.http.errors import openai_error
from flambeau.frontend.openai.chat import ChatWriter
from flambeau.frontend.openai.chat_translation import ChatTranslation, Document, to_event
from flambeau.frontend.openai_responses.requests import CLIENT_NAMES, ResponsesRequest

ID_BYTES = 24
ITEM_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
PART_EVENTS = {"output_text": "response.output_text", "reasoning_text": "response.reasoning_text"}


def new_id(prefix: str) -> str:
    """An id that nobody can guess: it is enough to read a stored response."""
    return f"{prefix}_{secrets.token_hex(ID_BYTES)}"


class OpenItem:
    """The output item that the model is writing: a message, a thought, or a call."""

    def __init__(self, kind: str, index: int, number: int, call: Document | None = None) -> None:
        self.kind, self.index, self.number = kind, index, number
        self.id = new_id(ITEM_PREFIXES[kind])
        self._call = call or {}
        self._texts: list[str] = []

    @property
    def place(self) -> Document:
        return {"item_id": self.id, "output_index": self.index}

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, text: str) -> None:
        self._texts.append(text)

    @property
    def part(self) -> Document:
        if self.kind == "message":
            return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": self.text}

    def document(self, status: str) -> Document:
        head: Document = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            function = self._call.get("function") or {}
            call = {"call_id": self._call.get("id") or self.id, "name": function.get("name") or ""}
            return {**head, **call, "arguments": self.text}
        content = [] if status == "in_progress" else [self.part]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}


class ResponseObjectWriter(ChatTranslation):
    """Writes a chat as a response: output items, one after another, each added and done.

    `on_done` gets the finished response and the message of the model, to store them.
    """

    names: Mapping[str, str] = {**CLIENT_NAMES, "messages": "input"}

    def __init__(
        self,
        chat: ChatWriter,
        request: ResponsesRequest,
        on_done: Callable[[Document, Document], None] | None = None,
    ) -> None:
        super().__init__(chat)
        self._request = request
        self._on_done = on_done
        self.id = new_id("resp")
        self._created = int(time.time())
        self._items: list[Document] = []
        self._open: OpenItem | None = None
        self._num_events = 0
        self._reason: str | None = None

    # ---- whole ----

    def document(self, completion: Document) -> Document:
        [choice] = completion["choices"]
        message = choice["message"]
        calls = [{**call, "index": i} for i, call in enumerate(message.get("tool_calls") or ())]
        for _ in self._on_delta({**message, "tool_calls": calls}):
            pass
        self._reason = choice["finish_reason"]
        for _ in self._close(self._status):
            pass
        return self._finished(completion["usage"])

    # ---- streamed ----

    def on_chunk(self, chunk: Document) -> Iterator[Document]:
        if not self._num_events:
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))
        for choice in chunk["choices"]:
            yield from self._on_delta(choice["delta"])
            self._reason = choice["finish_reason"] or self._reason

    def on_end(self, usage: Document) -> Iterable[Document]:
        yield from self._close(self._status)
        yield self._event(f"response.{self._status}", response=self._finished(usage))

    def error(self, status: int, message: str, error: FlambeauError, cause: str) -> bytes:
        document = openai_error(status, message, error, cause)
        flat = {name: document[name] for name in ("code", "message", "param")}
        return to_event(self._event("error", **flat, error=document))

    def _event(self, kind: str, **fields: Any) -> Document:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _on_delta(self, delta: Document) -> Iterator[Document]:
        if thought := delta.get("reasoning_content"):
            yield from self._switch("reasoning", 0)
            yield from self._add(thought)
        if text := delta.get("content"):
            yield from self._switch("message", 0)
            yield from self._add(text)
        for call in delta.get("tool_calls") or ():
            yield from self._switch("function_call", call["index"], call)
            if arguments := (call.get("function") or {}).get("arguments"):
                yield from self._add(arguments)

    def _switch(self, kind: str, number: int, call: Document | None = None) -> Iterator[Document]:
        """End the item that is open, and begin this one, unless it is the open one."""
        if self._open is not None and (self._open.kind, self._open.number) == (kind, number):
            return
        yield from self._close("completed")
        item = self._open = OpenItem(kind, len(self._items), number, call)
        yield self._event("response.output_item.added", output_index=item.index, item=item.document("in_progress"))
        if kind != "function_call":
            yield self._event("response.content_part.added", **item.place, content_index=0, part=item.part)

    def _add(self, text: str) -> Iterator[Document]:
        item = self._open
        assert item is not None
        item.add(text)
        if item.kind == "function_call":
            yield self._event("response.function_call_arguments.delta", **item.place, delta=text)
            return
        logprobs: Document = {"logprobs": []} if item.kind == "message" else {}
        kind = PART_EVENTS[item.part["type"]]
        yield self._event(f"{kind}.delta", **item.place, content_index=0, delta=text, **logprobs)

    def _close(self, status: str) -> Iterator[Document]:
        item, self._open = self._open, None
        if item is None:
            return
        document = item.document(status)
        self._items.append(document)
        if item.kind == "function_call":
            yield self._event(
                "response.function_call_arguments.done",
                **item.place,
                name=document["name"],
                arguments=item.text,
            )
        else:
            logprobs: Document = {"logprobs": []} if item.kind == "message" else {}
            kind = PART_EVENTS[item.part["type"]]
            yield self._event(f"{kind}.done", **item.place, content_index=0, text=item.text, **logprobs)
            yield self._event("response.content_part.done", **item.place, content_index=0, part=item.part)
        yield self._event("response.output_item.done", output_index=item.index, item=document)

    # ---- the response ----

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _finished(self, usage: Document) -> Document:
        response = self._response(self._status, usage)
        if self._on_done is not None:
            self._on_done(response, message_of(self._items))
        return response

    def _response(self, status: str, usage: Document | None = None) -> Document:
        request = self._request
        text, reasoning = request.text or {}, request.reasoning or {}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "model": self.model,
            "output": [*self._items],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "service_tier": "default",
            "store": request.is_stored,
            "temperature": request.temperature,
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": 0,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else usage_of(usage),
            "user": request.user,
            "metadata": request.metadata or {},
        }


def message_of(items: Iterable[Document]) -> Document:
    """The output of a response as a message of a chat, for the next request."""
    message: Document = {"role": "assistant", "content": ""}
    calls = []
    for item in items:
        if item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        else:
            name = "content" if item["type"] == "message" else "reasoning_content"
            message[name] = message.get(name, "") + item["content"][0]["text"]
    return {**message, "tool_calls": calls} if calls else message


def usage_of(usage: Document) -> Document:
    prompt = usage.get("prompt_tokens_details") or {}
    completion = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage.get("prompt_tokens", 0),
        "input_tokens_details": {"cached_tokens": prompt.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": usage.get("completion_tokens", 0),
        "output_tokens_details": {"reasoning_tokens": completion.get("reasoning_tokens", 0)},
        "total_tokens": usage.get("total_tokens", 0),
    }
