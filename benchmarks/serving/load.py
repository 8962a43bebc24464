"""The clients: wrk for throughput and latency, and a reader that checks streams chunk by chunk."""

import http.client
import json
import math
import re
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from peers import HOST, Launch
from workloads import CHUNKS, SLOW_CHUNKS, SLOW_STREAM, STREAM, Body

SCRIPT = Path(__file__).parent / "post.lua"
CHUNK = re.compile(rb"<(\d+)(?:@(\d+))?>")


class LoadFailed(Exception):
    """The client failed, not the server."""


def run_wrk(launch: Launch, body: Body, assets: Path, connections: int, seconds: float) -> dict[str, Any]:
    """Keeps `connections` busy for a while; one wrk thread, to leave the server the other cores."""
    command = ["wrk", "--threads", "1", "--connections", str(connections), "--duration", f"{math.ceil(seconds)}s"]
    command += ["--timeout", "30s", "--latency", "--script", str(SCRIPT), launch.url]
    command += ["--", str(assets / body.file), body.content_type]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
    except subprocess.TimeoutExpired as error:
        raise LoadFailed("wrk did not end in time") from error
    lines = [line for line in output.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise LoadFailed(f"wrk said nothing: {output.stderr.strip()[-200:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    good = result["requests"] - result["refused"]
    return {
        "requests": result["requests"],
        "rps": round(good / result["seconds"], 2),
        "p50_ms": result["p50_ms"],
        "p90_ms": result["p90_ms"],
        "p99_ms": result["p99_ms"],
        "max_ms": result["max_ms"],
        "errors": result["refused"] + result["failed"],
        "bytes_per_answer": round(result["bytes"] / result["requests"]) if result["requests"] else 0,
    }


def run_steadily(launch: Launch, body: Body, data: bytes, connections: int, seconds: float) -> dict[str, Any]:
    """The rate between the first and the last answer, for slow models: unfinished requests do not distort it."""
    ends_ns: list[int] = []
    times_ms: list[float] = []
    errors: list[int] = []
    stop_ns = time.monotonic_ns() + int(seconds * 1e9)

    def client(_: int) -> None:
        connection = http.client.HTTPConnection(HOST, launch.port, timeout=30)
        while (began_ns := time.monotonic_ns()) < stop_ns:
            connection.request("POST", launch.path, data, {"Content-Type": body.content_type})
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                errors.append(response.status)
            ends_ns.append(time.monotonic_ns())
            times_ms.append((ends_ns[-1] - began_ns) / 1e6)
        connection.close()

    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(client, range(connections)))
    counted = sorted(end for end in ends_ns if end <= stop_ns)
    if len(counted) < 2:
        raise LoadFailed("too few answers to tell a rate")
    return {
        "rps": (len(counted) - 1) / (counted[-1] - counted[0]) * 1e9,
        "p50_ms": statistics.median(times_ms),
        "p99_ms": sorted(times_ms)[int(len(times_ms) * 0.99)],
        "errors": len(errors),
    }


def send(launch: Launch, body: Body, assets: Path, connections: int, requests: int, limit_s: float) -> dict[str, int]:
    """Sends at least this many requests, in several runs of wrk, within a time limit."""
    sent = errors = 0
    deadline = time.monotonic() + limit_s
    seconds = 2.0
    while sent < requests and time.monotonic() < deadline:
        result = run_wrk(launch, body, assets, connections, seconds)
        sent += result["requests"] - result["errors"]
        errors += result["errors"]
        rate = max(result["rps"], 1)
        seconds = min((requests - sent) / rate + 0.5, 30, max(deadline - time.monotonic(), 1))
    return {"requests": sent, "errors": errors}


class StreamAnswer:
    """One streamed answer as it arrives; moments are of the machine's monotonic clock, in nanoseconds."""

    def __init__(self, sent_ns: int):
        self.sent_ns = self.ended_ns = sent_ns
        self.reads = 0
        self.indexes: list[int] = []
        self.made_ns: list[int] = []
        self.arrived_ns: list[int] = []

    def read(self, response: http.client.HTTPResponse) -> None:
        """Reads chunks until the answer ends."""
        buffer = b""
        while data := response.read1(65536):
            now_ns = time.monotonic_ns()
            self.reads += 1
            buffer += data
            end = 0
            for found in CHUNK.finditer(buffer):
                end = found.end()
                self.indexes.append(int(found[1]))
                self.made_ns.append(int(found[2] or 0))
                self.arrived_ns.append(now_ns)
            buffer = buffer[end:]
        self.ended_ns = time.monotonic_ns()

    def is_good(self, chunks: int) -> bool:
        return self.indexes == list(range(chunks))


def read_stream(launch: Launch, body: Body, data: bytes) -> StreamAnswer:
    """Sends one request and records when each chunk arrives."""
    connection = http.client.HTTPConnection(HOST, launch.port, timeout=15)
    try:
        connection.connect()
        sent_ns = time.monotonic_ns()
        connection.request("POST", launch.path, data, {"Content-Type": body.content_type})
        answer = StreamAnswer(sent_ns)
        try:
            answer.read(connection.getresponse())
        except (http.client.HTTPException, ConnectionError):
            pass  # a broken answer is a short one, and is counted as bad
        return answer
    finally:
        connection.close()


def check_streams(launch: Launch, assets: Path) -> dict[str, Any]:
    """Order and completeness, alone and sixteen at a time; time to first chunk; promptness of a slow stream."""
    data = (assets / STREAM.file).read_bytes()
    alone = [_answer_after_rest(launch, data) for _ in range(20)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda _: read_stream(launch, STREAM, data), range(32)))
    slow = [read_stream(launch, SLOW_STREAM, (assets / SLOW_STREAM.file).read_bytes()) for _ in range(2)]
    bad = sum(not answer.is_good(CHUNKS) for answer in alone + together)
    bad += sum(not answer.is_good(SLOW_CHUNKS) for answer in slow)
    delays_ms = [
        (arrived - made) / 1e6
        for answer in slow
        for made, arrived in zip(answer.made_ns, answer.arrived_ns, strict=True)
    ]
    whole = [answer for answer in alone if answer.is_good(CHUNKS)]
    result: dict[str, Any] = {"bad_answers": bad, "answers": len(alone) + len(together) + len(slow)}
    if whole:
        result["first_chunk_ms"] = _median_ms([answer.arrived_ns[0] - answer.sent_ns for answer in whole])
        result["answer_ms"] = _median_ms([answer.ended_ns - answer.sent_ns for answer in whole])
        result["reads_per_answer"] = statistics.median(answer.reads for answer in whole)
    if delays_ms:
        result["slow_delay_ms"] = round(max(delays_ms), 2)
        result["slow_delay_p50_ms"] = round(statistics.median(delays_ms), 2)
    return result


def first_chunk_ms(launch: Launch, assets: Path) -> float | None:
    """The median time to first chunk of a few streams, one at a time."""
    data = (assets / STREAM.file).read_bytes()
    answers = [_answer_after_rest(launch, data) for _ in range(10)]
    return _median_ms([answer.arrived_ns[0] - answer.sent_ns for answer in answers if answer.arrived_ns])


def _answer_after_rest(launch: Launch, data: bytes) -> StreamAnswer:
    time.sleep(0.02)
    return read_stream(launch, STREAM, data)


def _median_ms(values_ns: list[int]) -> float | None:
    return round(statistics.median(values_ns) / 1e6, 3) if values_ns else None
