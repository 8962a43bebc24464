"""What one streamed token costs the server: from a worker's frame to the bytes for the client's socket.

    python benchmarks/llm/token_path.py

Everything between the two system calls is real: frame, worker, job, reply, chunk. Prints microseconds of CPU by token,
where each of 1, 8 and 64 streams gets a token in a step, and what of that OpenAI's events take. Takes ten seconds.
"""

import asyncio
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.openai.chat import ChatWriter
from flambeau.frontend.openai.completions import CompletionWriter
from flambeau.frontend.openai.responses import GenerationReply, ResponseHead
from flambeau.serving.job import Job, RequestBody
from flambeau.wire.channel import decode_to_server, to_frame
from flambeau.wire.generation import Piece, Token, encode_pieces
from flambeau.wire.messages import Part
from support.jobs import new_worker

STEPS, ROUNDS = 1000, 7
HEAD = ResponseHead("chatcmpl-0123456789abcdef0123456789abcdef", 1_700_000_000, "llama-3.1-8b", "fp_01234567")
TOP = [(i, f" word{i}", -1.5 - i, f" word{i}".encode()) for i in range(5)]
TOKEN = Token(1234, " token", -0.693, b" token", TOP)
KINDS = {
    "chat": (ChatWriter, False, Piece(0, " token")),
    "completion": (CompletionWriter, False, Piece(0, " token")),
    "chat with 5 logprobs": (ChatWriter, True, Piece(0, " token", None, [TOKEN])),
}


class Connection:
    """A client that takes everything at once."""

    common = b""
    is_draining = False
    counts_bytes = False

    def __init__(self) -> None:
        self.num_writes = 0

    def write(self, data: bytes) -> None:
        self.num_writes += 1

    def on_answer(self, exchange: Exchange, status: int) -> None:
        pass


def new_streams(worker, kind: str, count: int) -> tuple[list[Job], list[Connection]]:
    """Jobs that the worker holds, each with a client."""
    writer, has_logprobs, _ = KINDS[kind]
    jobs, connections = [], [Connection() for _ in range(count)]
    for connection in connections:
        exchange = Exchange(connection, "POST", "/v1/chat/completions", [], "1.1", 0.0)
        model = SimpleNamespace(answers={200: 0})
        made = writer(HEAD, 1, has_logprobs=has_logprobs, has_usage=False)
        reply = GenerationReply(exchange, model, False, made, is_streamed=True)
        job = Job(reply, request_id="r", headers=[], body=RequestBody(b""), arrived=0.0, kind="generate")
        worker.send([job])
        jobs.append(job)
    return jobs, connections


def seconds_of(call, frame) -> tuple[float, float]:
    """The best of several rounds, and their median."""
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()  # others want this machine too
        for _ in range(STEPS):
            call(frame)
        times.append((time.process_time() - began) / STEPS)
    return min(times), statistics.median(times)


async def main() -> None:
    print(f"{'µs by token (best, median)':32}{'streams':>8}{'all':>16}{'events alone':>16}")
    for kind, (writer, has_logprobs, piece) in KINDS.items():
        for count in (1, 8, 64):
            worker = new_worker(is_concurrent=True, places=count, abilities=["generate"])
            jobs, connections = new_streams(worker, kind, count)
            frame = to_frame([Part(job.id, encode_pieces([piece]), last=False) for job in jobs])[4:]
            step = seconds_of(lambda payload, worker=worker: worker._receive(decode_to_server(payload)), frame)
            assert all(connection.num_writes == 1 + ROUNDS * STEPS for connection in connections)
            alone = seconds_of(writer(HEAD, 1, has_logprobs=has_logprobs, has_usage=False).events, piece)
            whole = " ".join(f"{seconds / count * 1e6:7.2f}" for seconds in step)
            events = " ".join(f"{seconds * 1e6:7.2f}" for seconds in alone)
            print(f"{kind:32}{count:8}{whole:>16}{events:>16}")


asyncio.run(main())
