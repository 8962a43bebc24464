"""`flambeau llm chat`: a chat in the terminal with a model of a running server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from flambeau.cli.api_client import RequestFailed, authorization, send
from flambeau.errors import ConfigError

HELP = "Type a message. /clear starts a new conversation, /quit or Ctrl-D exits, Ctrl-C stops an answer."

Message = dict[str, str]


def chat(url: str, model: str | None, *, system: str | None, options: dict[str, Any], prompt: str | None) -> None:
    """Chat with a model; with a prompt, print one answer and return."""
    model = model or find_text_model(url)
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    if prompt is not None:
        print_answer(url, model, [*opening, {"role": "user", "content": prompt}], options)
        return
    print(f"{model} at {url}. {HELP}", file=sys.stderr)
    converse(url, model, opening, options)


def converse(url: str, model: str, opening: list[Message], options: dict[str, Any]) -> None:
    messages = [*opening]
    while (words := read_message()) is not None:
        if words == "/clear":
            messages = [*opening]
            continue
        messages.append({"role": "user", "content": words})
        try:
            messages.append({"role": "assistant", "content": print_answer(url, model, messages, options)})
        except RequestFailed as error:  # the conversation is too long, for example
            messages.pop()
            print(f"flambeau: {error}; /clear starts a new conversation", file=sys.stderr)


def read_message() -> str | None:
    """The user's next message; None at the end of input."""
    while True:
        try:
            words = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return None
        if words == "/quit":
            return None
        if words:
            return words


def print_answer(url: str, model: str, messages: list[Message], options: dict[str, Any]) -> str:
    """Send the conversation, print the answer as it arrives, and return it."""
    body = json.dumps({"model": model, "messages": messages, "stream": True, **options}).encode()
    headers = {"content-type": "application/json", **authorization("FLAMBEAU_INFERENCE_KEY")}
    response = send(url, "POST", "/v1/chat/completions", body, headers)
    answer = ""
    try:
        for text in read_events(response):
            answer += text
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        response.close()
    print()
    return answer


def read_events(lines: Iterable[bytes]) -> Iterator[str]:
    """The pieces of text in a stream of server-sent events."""
    for line in lines:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            raise RequestFailed(event["error"].get("code") or 500, event["error"]["message"], "")
        for choice in event.get("choices", []):
            yield choice["delta"].get("content") or ""


def find_text_model(url: str) -> str:
    """The name of the only model that generates text; an error if there are none or several."""
    response = send(url, "GET", "/v1/models", None, authorization("FLAMBEAU_INFERENCE_KEY"))
    try:
        entries = json.loads(response.read())["data"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{url} is not the address of an inference API; use its port, 8080 by default") from None
    names = [entry["id"] for entry in entries if "generate" in entry.get("abilities", [])]
    if len(names) == 1:
        return str(names[0])
    if not names:
        raise ConfigError(f"no model at {url} generates text; serve one with `flambeau llm serve CHECKPOINT`")
    raise ConfigError(f"{url} has several models ({', '.join(names)}); choose one with --model")
