"""What is fuzzed: each target takes bytes, and raises if it fails in a way that the code does not promise."""

from __future__ import annotations

import logging
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flambeau.archive.manifest import check_files, read_config
from flambeau.archive.reader import UnpackLimits
from flambeau.archive.unpack import list_entries, read_manifest_of, unpack
from flambeau.config.model import ModelConfig
from flambeau.config.server import ServerConfig
from flambeau.config.yaml_file import load_yaml
from flambeau.errors import ArchiveError, BadRequest, ConfigError
from flambeau.frontend.http.parser import MalformedRequest
from flambeau.frontend.openai.requests import ChatRequest, CompletionRequest, EmbeddingRequest, read_request
from flambeau.handlers.envelopes.open_inference import read_output_spec, to_row
from flambeau.handlers.envelopes.request_documents import document_of
from flambeau.llm.chat.deltas import ChatDelta, ParsedCall, whole_calls
from flambeau.llm.chat.formats import REASONING_FORMATS, TOOL_FORMATS
from flambeau.llm.chat.stream_parser import ParserOptions, StreamParser
from flambeau.llm.errors import LLMError
from flambeau.llm.text.chat_template import ChatTemplate, read_messages
from flambeau.torchserve.config_properties import to_properties
from flambeau.torchserve.java_properties import parse
from flambeau.wire.channel import BadFrame, FrameBuffer, decode_to_server, decode_to_worker
from flambeau.worker.inputs import InputReader
from unit.frontend.http.test_parser import Receiver

LIMIT_S = 10  # one input may take this long
LIMITS = UnpackLimits()


class Broken(Exception):
    """A promise that is not an exception: two ways that must agree, a file outside its folder, no end."""


@dataclass(frozen=True, slots=True)
class Target:
    """`check` raises on a fault. `tokens` are pieces that random bytes would not hit."""

    name: str
    check: Callable[[bytes], None]
    tokens: tuple[bytes, ...]
    needs: str = ""  # a package


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Broken in the main thread after `seconds`."""

    def stop(*_: object) -> None:
        raise Broken(f"no end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_archive(data: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        archive = folder / "in" / "a.mar"
        archive.parent.mkdir()
        archive.write_bytes(data)
        into = folder / "out" / "a"
        into.parent.mkdir()
        for read in (list_entries, read_manifest_of):
            try:
                read(archive)
            except ArchiveError:
                pass
        try:
            unpack(archive, into, LIMITS)
            manifest = read_manifest_of(into)
            if manifest is not None:
                check_files(manifest, into)
            read_config(into)
        except (ArchiveError, ConfigError):
            pass
        outside = [path for path in folder.rglob("*") if folder / "out" / "a" not in (path, *path.parents)]
        strangers = [path.name for path in outside if path.name not in ("in", "out", "a.mar")]
        if strangers:
            raise Broken(f"files outside the folder of the archive: {strangers}")
        for path in into.rglob("*"):
            if path.is_symlink() and not path.resolve().is_relative_to(into.resolve()):
                raise Broken(f"{path.name} leads outside")


def check_frames(data: bytes) -> None:
    for decode in (decode_to_server, decode_to_worker):
        outcomes = [decoded(decode, data, step) for step in (len(data) or 1, 3)]
        if outcomes[0] != outcomes[1]:
            raise Broken(f"{outcomes[0]} in one piece, {outcomes[1]} in pieces")


def decoded(decode: Callable[[memoryview], list[Any]], data: bytes, step: int) -> list[str]:
    """The messages in frames that arrive in pieces; the last one is the fault, if any."""
    buffer = FrameBuffer(1 << 20)
    found: list[str] = []
    try:
        while data:
            space = buffer.space()
            count = min(step, len(space), len(data))
            space[:count] = data[:count]
            data = data[count:]
            for payload in buffer.filled(count):
                found += map(repr, decode(payload))
    except BadFrame:
        found.append("bad frame")
    return found


def check_head(data: bytes) -> None:
    whole_read = requests_in([data])
    split_read = requests_in([data[i : i + 1] for i in range(len(data))] if len(data) < 3000 else [data])
    if whole_read != split_read:
        raise Broken(f"in one piece {whole_read}, byte by byte {split_read}")


def requests_in(pieces: list[bytes]) -> list[Any]:
    """The requests before the first fault; two ways of arrival must agree on them."""
    receiver = Receiver(max_body_bytes=1 << 16, on_head_from_bytes=1 << 20)
    try:
        receiver.feed_all(pieces)
    except MalformedRequest:
        pass
    return receiver.requests


def check_properties(data: bytes) -> None:
    try:
        given = parse(data.decode("iso-8859-1"), {"HOME": "/home", "EMPTY": ""})
        to_properties(given, ServerConfig(), {})
    except ConfigError:
        pass


def check_yaml(data: bytes) -> None:
    try:
        document = load_yaml(data, "model-config.yaml")
        if isinstance(document, dict):
            ModelConfig().with_options(document)
    except ConfigError:
        pass


def check_openai(data: bytes) -> None:
    for kind in (ChatRequest, CompletionRequest, EmbeddingRequest):
        try:
            request = read_request(data, kind)
            if isinstance(request, ChatRequest):
                read_messages(request.messages)
        except BadRequest as error:
            if len(str(error)) > 5000:
                raise Broken("the message repeats the request") from error
        except LLMError:
            pass


def check_kserve(data: bytes) -> None:
    try:
        document = document_of({"body": bytearray(data)})
        read_output_spec(document)
        to_row(document)
    except BadRequest:
        pass


def check_form(data: bytes) -> None:
    from flambeau.wire.messages import Request

    kind, _, body = data.partition(b"\n")
    request = Request(1, "id", [("content-type", kind.decode("latin-1"))], body)
    try:
        input_reader().read(request)
    except BadRequest:
        pass


@cache
def input_reader() -> InputReader:
    return InputReader(decode=True)


MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
]


def check_template(data: bytes) -> None:
    try:
        template = ChatTemplate({"default": data.decode("utf-8", "replace")}, {"bos_token": "<s>", "eos_token": "</s>"})
        made = template.render(MESSAGES, tools=[{"function": {"name": "f"}}], add_generation_prompt=True)
    except LLMError:
        return
    if len(made) > 5_000_000:
        raise Broken(f"a prompt of {len(made)} characters")


def check_tool_calls(data: bytes) -> None:
    options = ParserOptions(tools={"f": {}, "get_weather": {}}, thought=REASONING_FORMATS["think"].markers)
    generated = data.decode("utf-8", "replace")
    for name, known in TOOL_FORMATS.items():
        at_once = read_reply(known.parser(options), generated, max(len(generated), 1))
        for step in (1, 7):
            in_pieces = read_reply(known.parser(options), generated, step)
            if in_pieces != at_once:
                raise Broken(f"{name}: at once {at_once}, in pieces of {step} {in_pieces}")


def read_reply(parser: StreamParser, text: str, step: int) -> tuple[str, str, list[ParsedCall]]:
    found = ChatDelta()
    for start in range(0, len(text), step):
        found.add(parser.take(text[start : start + step]))
    found.add(parser.finish())
    return found.reasoning, found.text, whole_calls(found.calls)


JSON = (b"{", b"}", b"[", b"]", b":", b",", b'"', b"null", b"true", b"1e999", b"-0", b"\\u0000", b"\\ud800", b"NaN")
TARGETS = (
    Target("archives", check_archive, (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"../", b"MAR-INF/MANIFEST.json")),
    Target("frames", check_frames, (b"\x92\x06\x01", b"\xc4\x01", b"\xff\xff\xff\xff", b"\x91\x93\x06\x01\xc4\x00")),
    Target(
        "heads",
        check_head,
        (b"\r\n", b"\r\n\r\n", b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", b" HTTP/1.1\r\n"),
    ),
    Target(
        "properties",
        check_properties,
        (b"inference_address=", b"http://[", b"models=", b"\\u", b"$$HOME$$", b"\\\n", b"allowed_urls=", b"=\x00"),
    ),
    Target(
        "yaml",
        check_yaml,
        (b"!!timestamp ", b"!!binary ", b"!!int ", b"&a ", b"*a", b"<<: ", b"? ", b"minWorkers: ", b"torchrun:\n  "),
    ),
    Target(
        "openai",
        check_openai,
        (*JSON, b'"messages"', b'"tools"', b'"prompt"', b'"logit_bias"', b'"response_format"', b'"stream_options"'),
    ),
    Target("kserve", check_kserve, (*JSON, b'"inputs"', b'"shape"', b'"datatype"', b'"BYTES"', b'"parameters"')),
    Target(
        "forms",
        check_form,
        (
            b"multipart/form-data; boundary=b\n",
            b"--b\r\n",
            b'Content-Disposition: form-data; name="a"\r\n\r\n',
            b"--b--",
        ),
    ),
    Target(
        "templates",
        check_template,
        (
            b"{% for m in messages %}",
            b"{% endfor %}",
            b"{{ ",
            b" }}",
            b" | ",
            b"tojson",
            b"namespace(",
            b"range(99999)",
        ),
        needs="jinja2",
    ),
    Target(
        "tool_calls",
        check_tool_calls,
        (
            b"<tool_call>",
            b"</tool_call>",
            b'{"name": "f", "arguments": {}}',
            b'{"parameters"',
            b"\\",
            b'"',
            b"; ",
            b"\n",
        ),
    ),
)


HEAD_TOKENS = next(target.tokens for target in TARGETS if target.name == "heads")
CALL_TOKENS = (b"?", b"&", b"min_worker=", b"batch_size=", b"%00", b"1e3", b"-1", b"%D9%A1", b"9" * 5000, b"/", b"%2F")


def run_target(target: Target, data: bytes) -> None:
    """Check one input within the time limit, quietly."""
    logging.disable(logging.CRITICAL)
    try:
        with time_limit(LIMIT_S):
            target.check(data)
    finally:
        logging.disable(logging.NOTSET)
