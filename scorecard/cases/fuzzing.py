"""Fuzzing: parsers in this process, and whole requests against a server."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import socket
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import quote_from_bytes

from scorecard.case import Case, NotHere, Stage
from scorecard.fuzzing import corpus
from scorecard.fuzzing.search import apply_changes, search
from scorecard.fuzzing.targets import CALL_TOKENS, HEAD_TOKENS, TARGETS, Target, run_target
from scorecard.probes import LatencyProbe
from support.archives import pack_handler
from support.running import RunningServer

KINDS = ("insert", "overwrite", "remove", "repeat", "cut")


def fuzz(target: Target) -> Callable[[Stage], None]:
    def run(stage: Stage) -> None:
        if target.needs and importlib.util.find_spec(target.needs) is None:
            raise NotHere(f"needs {target.needs}")
        kept = corpus.files_of(target.name)
        broken = [f"{file.name}: {trouble}" for file in kept if (trouble := fault_of(target, file.read_bytes()))]
        stage.note("inputs of the corpus", len(kept))
        stage.none("inputs of the corpus that break it", broken)
        seconds = 1 if stage.scale.is_quick else stage.scale.fuzz_s
        result = search(target, seconds=seconds, start=stage.scale.seed)
        for fault in result.faults:
            corpus.save(target.name, fault.data)
        stage.note("new inputs", result.num_inputs)
        stage.none("new inputs that break it", [f"{fault.error} for {fault.data[:60]!r}" for fault in result.faults])

    return run


def fault_of(target: Target, data: bytes) -> str:
    """How an input breaks a target; empty if it does not."""
    try:
        run_target(target, data)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fuzz_bytes_of_a_server(stage: Stage) -> None:
    """Mutated requests on every port, as bytes."""
    fuzz_server(stage, "heads", HEAD_TOKENS, lambda data: data)


def fuzz_management_calls(stage: Stage) -> None:
    """Mutated calls of the management API; the number of workers stays small."""
    fuzz_server(stage, "management", CALL_TOKENS, to_call)


def to_call(data: bytes) -> bytes:
    """A request from `METHOD target`; bytes that may not be in a target are encoded."""
    method, _, target = data.partition(b" ")
    word = method if method in (b"GET", b"POST", b"PUT", b"DELETE") else b"PUT"
    safe = quote_from_bytes(target.strip(), safe="/?&=%-._~").encode()
    few = re.sub(rb"((?:min|max)_worker|initial_workers)=(?=[2-9]|1\d|%)", rb"\1=0", safe)  # 0 before a large number
    return word + b" /" + few.lstrip(b"/") + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def fuzz_server(stage: Stage, name: str, tokens: tuple[bytes, ...], to_request: Callable[[bytes], bytes]) -> None:
    store = stage.new_folder("store")
    pack_handler(store, "echo", name="other")
    server = stage.serve("echo.py", "--model-store", store)
    dice = random.Random(stage.scale.seed)
    seeds = corpus.inputs_of(name)
    ports = (server.management_port,) if name == "management" else all_ports(server)
    errors = []
    inputs = [*seeds, *(mutated(dice, seeds, tokens) for _ in range(stage.scale.of(2000, 100)))]
    with LatencyProbe(server) as probe:
        for number, data in enumerate(inputs):
            if fault := server_error(ports[number % len(ports)], to_request(data)):
                errors.append(f"{fault} for {data[:80]!r}")
                corpus.save(name, data)
    stage.note("inputs", len(inputs))
    stage.none("server errors", errors)
    stage.equal("an ordinary call afterwards", server.request("GET", "/livez").status, 200)
    probe.judge(stage)


def mutated(dice: random.Random, seeds: list[bytes], tokens: tuple[bytes, ...]) -> bytes:
    changes = [
        (dice.choice(KINDS), dice.random(), dice.choice((*tokens, dice.randbytes(3)))) for _ in range(dice.randrange(5))
    ]
    return apply_changes(dice.choice(seeds), changes, dice.choice(seeds))


def all_ports(server: RunningServer) -> tuple[int, ...]:
    return server.port, server.management_port, server.metrics_port


def server_error(port: int, data: bytes) -> str:
    """The status and message of an answer that is a server error; empty if there is none."""
    parts = exchange_bytes(port, data).split(b"HTTP/1.1 ")[1:]
    errors = [part for part in parts if part[:1] == b"5" and part[:3] != b"503"]
    return errors[0][:3].decode() + " " + errors[0][-120:].decode(errors="replace") if errors else ""


def exchange_bytes(port: int, data: bytes) -> bytes:
    """Send bytes and read until the server closes; who asks it to close waits for the answer."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        try:
            client.sendall(data)
            if b"Connection: close" not in data:
                client.shutdown(socket.SHUT_WR)
            while piece := client.recv(65536):
                received += piece
        except OSError:
            pass
    return received


def described_requests(stage: Stage) -> None:
    try:
        import schemathesis
        from hypothesis import HealthCheck, Phase, given, seed, settings
    except ImportError:
        raise NotHere("needs schemathesis") from None
    store = stage.new_folder("store")
    for name in ("echo", "other"):
        pack_handler(store, "echo", name=name)
    server = stage.serve(store)
    counts: dict[str, int] = {}
    errors: list[str] = []
    for listener in ("port", "management_port", "metrics_port"):
        port = getattr(server, listener)
        schema = schemathesis.openapi.from_dict(json.loads(server.request("OPTIONS", "/", port=port).body))
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.method == "delete":
                continue  # it would remove the models that the others need
            label = f"{listener.removesuffix('_port')} {operation.method.upper()} {operation.path}"

            call = partial(call_operation, port=port, label=label, counts=counts, errors=errors)
            options = settings(
                max_examples=stage.scale.of(25, 2),
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=[*HealthCheck],
            )
            try:
                seed(stage.scale.seed)(options(given(operation.as_strategy())(plain_function(call))))()
            except Exception as error:
                errors.append(f"{label}: {type(error).__name__}: {error}")
    stage.note("operations of all ports", len(counts))
    stage.note("requests", sum(counts.values()))
    stage.none("server errors", errors)


def plain_function(call: Callable[[Any], None]) -> Callable[[Any], None]:
    """hypothesis decorates functions only."""

    def check(case: Any) -> None:
        call(case)

    return check


def call_operation(case: Any, *, port: int, label: str, counts: dict[str, int], errors: list[str]) -> None:
    """Send a generated request; note an answer that is a server error."""
    query = case.query or {}
    for key in ("min_worker", "max_worker", "initial_workers"):  # another case asks for millions
        if isinstance(query.get(key), int):
            query[key] = min(query[key], 2)
    counts[label] = counts.get(label, 0) + 1
    response = case.call(base_url=f"http://127.0.0.1:{port}", timeout=50)
    if response.status_code >= 500 and response.status_code != 503:
        errors.append(f"{label}: {response.status_code} {response.text[:100]}")


CASES = (
    *(
        Case(
            name=f"Fuzzing: {target.name.replace('_', ' ')}",
            group="fuzzing",
            promise="Every input is accepted or refused with an error of its kind, within seconds.",
            run=fuzz(target),
        )
        for target in TARGETS
    ),
    Case(
        name="Fuzzing: bytes on all ports of a server",
        group="fuzzing",
        promise="No server error, no crash; /livez answers within 50 ms (p99).",
        run=fuzz_bytes_of_a_server,
    ),
    Case(
        name="Fuzzing: calls of the management API",
        group="fuzzing",
        promise="No server error, no crash; /livez answers within 50 ms (p99).",
        run=fuzz_management_calls,
    ),
    Case(
        name="Fuzzing: requests that the API descriptions allow",
        group="fuzzing",
        promise="No request is a server error.",
        run=described_requests,
        limit_s=150,
    ),
)
