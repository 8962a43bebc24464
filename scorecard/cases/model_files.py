"""Model files and downloads that attack the server."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import struct
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from scorecard.case import Case, NotHere, Stage
from scorecard.probes import LatencyProbe, MemoryProbe, OwnAnswersClient, wait_for
from support.archives import pack_handler
from support.configured import ConfiguredServer
from support.file_server import serving_files
from support.running import RunningServer


class Payload:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.note), "w"))


def malicious_pt2(stage: Stage) -> None:
    try:
        import torch
    except ImportError:
        raise NotHere("needs torch") from None
    good = stage.folder / "good.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(4, 2), (torch.ones(1, 4),)), str(good))
    kinds = ("sample inputs", "weights", "constants")
    notes = {kind: stage.folder / f"ran {kind}" for kind in kinds}
    files = []
    for kind, note in notes.items():
        files.append(stage.folder / f"{kind.split()[0]}.pt2")
        spoil_program(good, files[-1], kind, pickled(Payload(note)))
    server = RunningServer(stage.new_folder("server") / "log", *map(str, [good, *files]), env={"OMP_NUM_THREADS": "1"})
    try:
        server.until(lambda: server._connects() and server.request("GET", "/startupz").status == 200, 100)
        stage.equal("status of an honest .pt2", server.predict("good", [1.0, 2.0, 3.0, 4.0]).status, 200)
    finally:
        status = server.stop()
    stage.none("parts of a .pt2 whose code ran", [kind for kind, note in notes.items() if note.exists()])
    stage.equal("exit status of the server", status, 0)


def pickled(value: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def spoil_program(good: Path, bad: Path, kind: str, payload: bytes) -> None:
    """Put a pickle into a program: as its sample inputs, or as a weight or constant that says it is pickled."""
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            if kind == "sample inputs" and entry.filename.endswith(".pt"):
                content = payload
            elif f"/{kind}/" in entry.filename and entry.filename.endswith("_config.json"):
                document = json.loads(content)
                for one in document["config"].values():
                    one["use_pickle"] = True
                content = json.dumps(document).encode()
            elif f"/{kind}/" in entry.filename:
                content = payload
            target.writestr(entry.filename.replace("good/", f"{bad.stem}/"), content)


def slow_downloads(stage: Stage) -> None:
    is_over = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000000")
        handler.end_headers()
        try:
            while not is_over.wait(0.2):
                handler.wfile.write(b"x")
        except OSError:
            pass

    store = stage.new_folder("store")
    pack_handler(store, "echo", name="local")
    count = stage.scale.of(40, 10)
    with serving_files() as web:
        web.files.update({f"/slow-{i}.mar": drip for i in range(count)})
        server = stage.configured(
            "echo.py", model_store=store, allowed_urls=[rf"{web.url}/.*"], allow_private_urls=True
        )
        with ThreadPoolExecutor(count) as pool:
            for i in range(count):
                pool.submit(quietly, server, f"{web.url}/slow-{i}.mar")
            wait_for(lambda: len(web.asked) >= 4, 10)
            time.sleep(1)
            with LatencyProbe(server) as probe:
                began = time.monotonic()
                status = register_status(server, "local.mar")
                stage.at_most("a local registration takes", time.monotonic() - began, 5, "s")
            stage.equal("status of a local registration", status, 200)
            stage.forget(server)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            stopped_s = wait_for(lambda: server.process.poll() is not None, 30)
            stage.within("stopped after SIGTERM within", stopped_s, 10)
            is_over.set()
            if stopped_s is None:
                server.process.kill()
            server.process.wait()
    stage.equal("exit status", server.process.returncode, 0)
    stage.none("files left in the store", [name for name in os.listdir(store) if name != "local.mar"])
    probe.judge(stage)


def quietly(server: ConfiguredServer, url: str) -> None:
    try:
        server.register(url)
    except OSError:
        pass


def register_status(server: ConfiguredServer, url: str) -> int | str:
    try:
        return server.manage("POST", f"/models?url={url}&initial_workers=1&synchronous=true", timeout=20).status
    except OSError as error:
        return type(error).__name__


def million_entries(stage: Stage) -> None:
    store = stage.new_folder("store")
    count = stage.scale.of(1_000_000, 100_000)
    write_zip_of_entries(store / "million.mar", count)
    server = stage.serve("echo.py", "--model-store", store)
    with MemoryProbe(server) as memory, LatencyProbe(server) as probe:
        with OwnAnswersClient(server, connections=2) as others:
            began = time.monotonic()
            reply = server.manage("POST", "/models?url=million.mar&initial_workers=1", timeout=80)
            stage.at_most("refused after", time.monotonic() - began, 5, "s")
        memory.judge(stage, peak_mb=100)
    stage.equal("status", reply.status, 400)
    others.judge(stage, refusals=False)
    probe.judge(stage)


def write_zip_of_entries(path: Path, count: int) -> None:
    """A zip of empty files, written directly: the module would take a minute."""
    pieces, directory, offset = [], [], 0
    for number in range(count):
        name = b"%07d" % number
        pieces.append(struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 0, 0, 33, 0, 0, 0, len(name), 0) + name)
        fixed = struct.pack(
            "<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, 0, 0, 33, 0, 0, 0, len(name), 0, 0, 0, 0, 0, offset
        )
        directory.append(fixed + name)
        offset += 30 + len(name)
    start, size = offset, sum(map(len, directory))
    end64 = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<IIQI", 0x07064B50, 0, start + size, 1)
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, min(size, 0xFFFFFFFF), start, 0)
    path.write_bytes(b"".join([*pieces, *directory, end64, locator, end]))


def mutated_archives(stage: Stage) -> None:
    store = stage.new_folder("store")
    good = pack_handler(stage.new_folder("good"), "echo", name="fuzzed").read_bytes()
    server = stage.serve("echo.py", "--model-store", store)
    dice = random.Random(stage.scale.seed)
    errors: list[str] = []
    statuses: dict[int, int] = {}
    for number in range(stage.scale.of(300, 40)):
        content = bytearray(good)
        for _ in range(dice.randrange(1, 8)):
            content[dice.randrange(len(content))] = dice.randrange(256)
        name = f"m{number}.mar"
        (store / name).write_bytes(content[: dice.randrange(len(content))] if number % 5 == 0 else content)
        reply = server.manage("POST", f"/models?url={name}&model_name=m{number}&initial_workers=0")
        statuses[reply.status] = statuses.get(reply.status, 0) + 1
        if reply.status >= 500:
            errors.append(f"{reply.status} {reply.text}")
        elif reply.status == 200:
            server.manage("DELETE", f"/models/m{number}")
        (store / name).unlink(missing_ok=True)
    stage.note("archives", sum(statuses.values()))
    stage.none("server errors", errors)
    outside = [file.name for file in stage.folder.rglob("escaped*")]
    stage.none("files written outside", outside)


CASES = (
    Case(
        name="A .pt2 that runs code",
        group="access",
        promise="Weights run no code unless the model says weights_only: false.",
        run=malicious_pt2,
        limit_s=180,
    ),
    Case(
        name="40 downloads that drip",
        group="faults",
        promise="Local models register within 5 s; SIGTERM ends the server within 10 s; no file is left.",
        run=slow_downloads,
        limit_s=150,
    ),
    Case(
        name="An archive of a million entries",
        group="access",
        promise="Entries are counted before they are read: 400 within 5 s, in little memory.",
        run=million_entries,
        limit_s=150,
    ),
    Case(
        name="300 damaged archives",
        group="access",
        promise="Each is refused with a reason; none is a server error, none writes outside its folder.",
        run=mutated_archives,
    ),
)
