"""Bad input gets a sentence: never a 500, a traceback or a wrong cause."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scorecard.case import Case, Stage, handler_file
from support.archives import pack_handler
from support.command import MODULE
from support.running import path

SCALE = (
    "min_worker=abc",
    "min_worker=1e3",
    "min_worker=2000000000",
    "min_worker=-1",
    "min_worker=1.5",
    "min_worker=%00",
    "min_worker=2&max_worker=1",
    "max_worker=abc",
    "max_worker=99999999999999999999999999",
    "min_worker=" + "9" * 5000,
    "min_worker=%D9%A1%D9%A1%D9%A1%D9%A1%D9%A1%D9%A1%D9%A1%D9%A1%D9%A1",
)
REGISTER = (
    "batch_size=-1",
    "batch_size=0",
    "batch_size=abc",
    "batch_size=99999999999999999999",
    "max_batch_delay=-1",
    "response_timeout=-5",
    "initial_workers=2000000000",
    "initial_workers=abc",
    "startup_timeout=0",
    "model_name=%00",
    "model_name=" + "x" * 5000,
    "handler=%00",
    "runtime=cobol",
)


def bad_parameters(stage: Stage) -> None:
    store = stage.new_folder("store")
    pack_handler(store, "echo", name="other")
    server = stage.serve("echo.py", "--model-store", store)
    wrong, num_tries = [], 0
    for method, targets in (
        ("PUT", [f"/models/echo?{one}" for one in SCALE]),
        ("POST", [f"/models?url=other.mar&{one}" for one in REGISTER]),
        ("POST", ["/models?url=%00", "/models?url=", "/models", "/models?url=a%00b.mar", "/models?url=" + "x" * 9000]),
        ("GET", ["/models?limit=abc", "/models?next_page_token=-1", "/models?limit=" + "9" * 30, "/models/%ff"]),
        ("DELETE", ["/models/nobody", "/models/%00", "/models/echo/%ff"]),
    ):
        for target in targets:
            if "2000000000" in target or "9999999999" in target or "%D9" in target:
                continue  # "Millions of workers" tries these under a guard
            reply = server.manage(method, target, timeout=30)
            num_tries += 1
            is_refusal = 400 <= reply.status < 500
            is_listed = method == "GET" and reply.status == 200
            if not (is_refusal or is_listed) or "Traceback" in reply.text or len(reply.body) > 20_000:
                wrong.append(f"{method} {target[:60]}: {reply.status} {reply.text[:80]}")
            if method == "POST" and reply.status == 200:
                server.manage("DELETE", "/models/other")
    for body in (b"\x00", b"{", b"[]", b"null", b'{"url": 5}', b'{"url": "\\u0000"}', b"\xff\xfe"):
        reply = server.manage("POST", "/models", body, headers={"Content-Type": "application/json"})
        num_tries += 1
        if not 400 <= reply.status < 500:
            wrong.append(f"POST /models with {body!r}: {reply.status} {reply.text[:80]}")
    stage.note("calls", num_tries)
    stage.none("calls that were not refused with a sentence", wrong)


PROPERTIES: dict[str, str | bytes] = {
    "a number": "job_queue_size=many\n",
    "a huge number": f"job_queue_size={'9' * 400}\n",
    "a negative number": "max_request_size=-5\n",
    "an address": "inference_address=http://[::1\n",
    "a port": "inference_address=http://127.0.0.1:99999\n",
    "a scheme": "management_address=gopher://127.0.0.1:1\n",
    "an escape": "model_store=\\uZZZZ\n",
    "bytes": b"model_store=\xff\xfe\n",
    "NUL": b"model_store=a\x00b\n",
    "JSON": 'models={"a": \n',
    "an expression": "allowed_urls=[\n",
    "a variable": "model_store=$$NOT_SET_ANYWHERE$$\n",
    "TLS files": "inference_address=https://127.0.0.1:0\ncertificate_file=none.pem\nprivate_key_file=none.pem\n",
}
YAMLS: dict[str, str | bytes] = {
    "timestamp": "when: !!timestamp x\n",
    "unclosed": "minWorkers: [1\n",
    "python object": "x: !!python/object/apply:os.system ['true']\n",
    "binary": "x: !!binary '*'\n",
    "int": "x: !!int abc\n",
    "float": "x: !!float abc\n",
    "bytes": b"\xff\xfe\x00",
    "merge": "a: &a {b: 1}\nc: {<<: 5}\n",
    "list": "- 1\n",
    "deep": "[" * 500,
    "anchors": "a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\n" + "".join(f"k{i}: [*c,*c]\n" for i in range(50)),
    "huge number": f"batchSize: {'9' * 5000}\n",
    "key": "? [a, b]\n: 1\n",
}


def bad_start(stage: Stage) -> None:
    properties = [*PROPERTIES][:: stage.scale.of(1, 4)]
    yamls = [*YAMLS][:: stage.scale.of(1, 4)]
    with ThreadPoolExecutor(2) as pool:
        found = [
            *pool.map(lambda kind: start_with_properties(stage, kind), properties),
            *pool.map(lambda kind: start_with_yaml(stage, kind), yamls),
        ]
    stage.note("starts", len(found))
    stage.none("starts that ended in a traceback, or did not end", [one for one in found if one])


def start_with_properties(stage: Stage, kind: str) -> str:
    folder = stage.new_folder("properties")
    content = PROPERTIES[kind]
    (folder / "config.properties").write_bytes(content if isinstance(content, bytes) else content.encode())
    words = ["--start", "--foreground", "--ncs", "--ts-config", "config.properties"]
    return trouble_of([*MODULE, *words], folder, f"config.properties with {kind}")


def start_with_yaml(stage: Stage, kind: str) -> str:
    folder = stage.new_folder("yaml")
    (folder / "echo.py").write_text(Path(handler_file("echo.py")).read_text())
    content = YAMLS[kind]
    (folder / "model-config.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    ports = ["--port", "0", "--management-port", "0", "--metrics-port", "0"]
    command = [sys.executable, "-m", "flambeau.cli.main", "serve", str(folder), "--handler", "echo.py", *ports]
    return trouble_of(command, folder, f"model-config.yaml with {kind}", may_run=True)


def trouble_of(command: list[str], folder: Path, kind: str, *, may_run: bool = False) -> str:
    """What is wrong with a start; empty if it ended with a sentence. `may_run`: the file may be harmless."""
    environment = {**os.environ, "PYTHONPATH": path(), "TMPDIR": str(folder)}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=4 if may_run else 20)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            output, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        if not may_run:
            return f"{kind}: the server started"
    if "Traceback (most recent call last)" in output:
        return f"{kind}: {output.strip().splitlines()[-1]}"
    return "" if process.returncode >= 0 or may_run else f"{kind}: killed by signal {-process.returncode}"


def racing_calls(stage: Stage) -> None:
    store = stage.new_folder("store")
    pack_handler(store, "echo", name="other")
    server = stage.serve("echo.py", "--model-store", store)
    targets = [
        ("POST", "/models?url=other.mar&initial_workers=1&synchronous=true"),
        ("PUT", "/models/other?min_worker=2&max_worker=2&synchronous=true"),
        ("DELETE", "/models/other"),
        ("GET", "/models/other"),
        ("PUT", "/models/other/1.0/set-default"),
    ]
    calls = targets * stage.scale.of(20, 4)
    with ThreadPoolExecutor(10) as pool:
        replies = [*pool.map(lambda call: (call, server.manage(*call, timeout=60)), calls)]
    errors = [
        f"{call[0]} {call[1].partition('?')[0]}: {reply.status} {reply.text[:120]}"
        for call, reply in replies
        if reply.status == 500
    ]
    stage.note("calls", len(calls))
    stage.none("racing calls that were a server error", errors)


CASES = (
    Case(
        name="Bad parameters",
        group="clients",
        promise="Each is refused with 4xx and a sentence that names the parameter.",
        run=bad_parameters,
    ),
    Case(
        name="Bad configuration files at start",
        group="clients",
        promise="The server exits with a sentence that names the key; never a traceback.",
        run=bad_start,
        limit_s=240,
    ),
    Case(
        name="Registering, scaling and removing one model at once",
        group="clients",
        promise="No call is a server error.",
        run=racing_calls,
        is_quick=True,
    ),
)
