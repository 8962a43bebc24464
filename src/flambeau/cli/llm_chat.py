"""`flambeau llm chat`: a chat in the terminal with a model of a running server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flambeau.cli.api_client import RequestFailed, authorization, send
from flambeau.cli.output import print_wrapped
from flambeau.errors import ConfigError, suggest

DIM = "\x1b[2m{}\x1b[0m"
INTRODUCTION = "Type a message; /help lists the commands, Ctrl-D exits, Ctrl-C stops an answer."
COMMANDS = {
    "/help": "show this list",
    "/system TEXT": "set the system message and start a new conversation; without a text, show it",
    "/save FILE": "write the conversation to a JSON file, as the OpenAI API takes it",
    "/clear": "start a new conversation",
    "/quit": "exit; also Ctrl-D",
}
MAX_HISTORY = 1000  # lines
SHOWN = 10  # models in an error

Message = dict[str, str]


def chat(url: str, model: str | None, *, system: str | None, options: dict[str, Any], prompt: str | None) -> None:
    """Chat with a model; with a prompt, print one answer and return."""
    model = model or find_text_model(url)
    conversation = Conversation(system)
    if prompt is not None:
        print_answer(url, model, [*conversation.messages, {"role": "user", "content": prompt}], options)
        return
    print_wrapped(f"{model} at {url}. {INTRODUCTION}", file=sys.stderr)
    with line_editor():
        converse(url, model, conversation, options)


class Conversation:
    """The messages so far. `run` executes a command, such as /system."""

    def __init__(self, system: str | None = None) -> None:
        self.messages: list[Message] = []
        self.start(system)

    @property
    def system(self) -> str | None:
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    def start(self, system: str | None) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    def run(self, words: str) -> str:
        """Execute a command and return what it says."""
        command, _, text = words.partition(" ")
        text = text.strip()
        if command == "/help":
            return "\n".join(f"{name:<14}{meaning}" for name, meaning in COMMANDS.items())
        if command == "/clear":
            self.start(self.system)
            return "a new conversation begins"
        if command == "/system":
            if text:
                self.start(text)
                return "the system message is set; a new conversation begins"
            return self.system or "there is no system message; /system TEXT sets one"
        if command == "/save":
            return self.save(text)
        near = suggest(command, [name.partition(" ")[0] for name in COMMANDS])
        return f"{command} is not a command; {f'did you mean {near}?' if near else '/help lists them'}"

    def save(self, name: str) -> str:
        if not name:
            return "name a file: /save FILE"
        path = Path(name).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(self.messages, file, ensure_ascii=False, indent=2)
                file.write("\n")
        except FileExistsError:
            return f"{path} exists; name another file"
        except (OSError, ValueError) as error:
            return f"{path} cannot be written: {getattr(error, 'strerror', None) or error}"
        return f"{len(self.messages)} messages are in {path}"


def converse(url: str, model: str, conversation: Conversation, options: dict[str, Any]) -> None:
    while (words := read_message()) is not None:
        if words.startswith("/"):
            print(conversation.run(words), file=sys.stderr)
            continue
        messages = conversation.messages
        messages.append({"role": "user", "content": words})
        try:
            messages.append({"role": "assistant", "content": print_answer(url, model, messages, options)})
        except RequestFailed as error:  # the conversation is too long, for example
            messages.pop()
            print(f"flambeau: {error}; /clear starts a new conversation", file=sys.stderr)


def read_message() -> str | None:
    """The user's next message or command; None at the end of input."""
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


@contextmanager
def line_editor() -> Iterator[None]:
    """On a terminal: edit lines, complete commands with Tab, and keep the history of earlier chats."""
    try:
        import readline
    except ImportError:  # a Python without it; lines cannot be edited
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    file = history_file()
    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(MAX_HISTORY)
    readline.set_completer(complete_command)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
    try:
        yield
    finally:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)  # what people type to a model is their own
            readline.write_history_file(file)


def complete_command(text: str, state: int) -> str | None:
    """The commands that begin with `text`, one at a time, as readline asks for them."""
    names = [name.partition(" ")[0] for name in COMMANDS]
    found = [name for name in names if text.startswith("/") and name.startswith(text)]
    return found[state] if state < len(found) else None


def history_file() -> Path:
    folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(folder) / "flambeau" / "chat_history"


def print_answer(url: str, model: str, messages: list[Message], options: dict[str, Any]) -> str:
    """Send the conversation, print the answer as it arrives, and return it. Reasoning is printed to stderr."""
    body = json.dumps({"model": model, "messages": messages, "stream": True, **options}).encode()
    headers = {"content-type": "application/json", **authorization("FLAMBEAU_INFERENCE_KEY")}
    response = send(url, "POST", "/v1/chat/completions", body, headers)
    answer, has_reasoned = "", False
    try:
        for reasoning, text in read_events(response):
            answer += text
            if reasoning:
                sys.stderr.write(DIM.format(reasoning) if sys.stderr.isatty() else reasoning)
                sys.stderr.flush()
                has_reasoned = True
            elif text and has_reasoned:
                sys.stderr.write("\n")
                has_reasoned = False
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        response.close()
    print()
    return answer


def read_events(lines: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """The pieces of reasoning and text in a stream of server-sent events."""
    for line in lines:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            raise RequestFailed(event["error"].get("code") or 500, event["error"]["message"], "")
        for choice in event.get("choices", []):
            delta = choice["delta"]
            yield delta.get("reasoning_content") or "", delta.get("content") or ""


def find_text_model(url: str) -> str:
    """The name of the only model that generates text; an error if there are none or several."""
    response = send(url, "GET", "/v1/models", None, authorization("FLAMBEAU_INFERENCE_KEY"))
    try:
        document = json.loads(response.read())
        entries = document["data"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{url} is not the address of an inference API; use its port, 8080 by default") from None
    names = [entry["id"] for entry in entries if "generate" in entry.get("abilities", [])]
    if len(names) == 1:
        return str(names[0])
    if not names and (missing := missing_models(url, document.get("models", []))):
        waits = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not ready: see `flambeau models ls`"
        raise ConfigError(f"no model at {url} generates text yet; {waits}")
    if not names:
        raise ConfigError(f"no model at {url} generates text; serve one with `flambeau llm serve CHECKPOINT`")
    raise ConfigError(f"{url} has several models ({', '.join(names)}); choose one with --model")


def missing_models(url: str, names: Sequence[str]) -> list[str]:
    """The models that have no worker yet, so that nobody knows what they can do."""
    headers = authorization("FLAMBEAU_INFERENCE_KEY")
    found = [json.load(send(url, "GET", f"/v1/models/{quote(name, safe='')}", None, headers)) for name in names[:SHOWN]]
    return [model["name"] for model in found if model.get("ready") is False]
