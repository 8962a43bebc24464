"""`flambeau llm chat`: a conversation in the terminal, with a running server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from flambeau.cli.api_client import RequestFailed, key_in, send
from flambeau.errors import ConfigError

HELP = "Type a message; /clear forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer."

Message = dict[str, str]


def chat(url: str, model: str | None, *, system: str | None, options: dict[str, Any], prompt: str | None) -> None:
    """Talk with a model; with a prompt, print one answer and end."""
    model = model or find_text_model(url)
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    if prompt is not None:
        say(url, model, [*opening, {"role": "user", "content": prompt}], options)
        return
    print(f"{model} at {url}. {HELP}", file=sys.stderr)
    converse(url, model, opening, options)


def converse(url: str, model: str, opening: list[Message], options: dict[str, Any]) -> None:
    """Turn after turn, until the user ends it."""
    messages = [*opening]
    while (words := ask()) is not None:
        if words == "/clear":
            messages = [*opening]
            continue
        messages.append({"role": "user", "content": words})
        try:
            messages.append({"role": "assistant", "content": say(url, model, messages, options)})
        except RequestFailed as error:  # too long a conversation, for one
            messages.pop()
            print(f"flambeau: {error}; /clear forgets the conversation", file=sys.stderr)


def ask() -> str | None:
    """What the user says next; None: nothing any more."""
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


def say(url: str, model: str, messages: list[Message], options: dict[str, Any]) -> str:
    """Send the conversation, print the answer as it comes, and return it."""
    body = json.dumps({"model": model, "messages": messages, "stream": True, **options}).encode()
    headers = {"content-type": "application/json", **key_in("FLAMBEAU_INFERENCE_KEY")}
    response = send(url, "POST", "/v1/chat/completions", body, headers)
    answer = ""
    try:
        for text in texts(response):
            answer += text
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        response.close()
    print()
    return answer


def texts(lines: Iterable[bytes]) -> Iterator[str]:
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
    """The one model that generates text."""
    response = send(url, "GET", "/v1/models", None, key_in("FLAMBEAU_INFERENCE_KEY"))
    try:
        entries = json.loads(response.read())["data"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{url} does not list its models as an inference address does; is it another port?") from None
    names = [entry["id"] for entry in entries if "generate" in entry.get("abilities", [])]
    if len(names) == 1:
        return str(names[0])
    if not names:
        raise ConfigError(f"no model at {url} generates text; serve one with `flambeau llm serve CHECKPOINT`")
    raise ConfigError(f"{url} has several models ({', '.join(names)}); choose one with --model")
