"""A client process that reads many streams at once and notes when each event arrives, for http_streams.py.

    python benchmarks/llm/stream_client.py PORT STREAMS SALT NEW_TOKENS OPTIONS

It connects, prints a line, and sends its requests when it has read one, so that several processes begin together. It
reads with one thread and parses nothing: a client that is busy would be measured instead of the server.
"""

import json
import re
import selectors
import socket
import sys
import time
from typing import Any

EVENT, END = b"data: {", b"data: [DONE]"
USAGE = re.compile(rb'"completion_tokens":(\d+)')
TAIL_BYTES = 2000  # the last events: usage and end


class Stream:
    """One request and the events of its response."""

    def __init__(self, port: int, body: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        self._request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        self.arrivals: list[float] = []  # of each event, in seconds of the wall clock
        self._tail = b""

    def send(self) -> None:
        self.socket.sendall(self._request)
        self.socket.setblocking(False)

    def read(self) -> bool:
        """Take what has arrived; False at the end of the stream."""
        data = self.socket.recv(1 << 16)
        joined = self._tail[1 - len(EVENT) :] + data  # an event may begin in two reads
        self.arrivals += [time.time()] * joined.count(EVENT)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        return bool(data) and END not in self._tail

    def num_tokens(self) -> int:
        found = USAGE.search(self._tail)
        if found is None:
            raise RuntimeError(f"the stream ended without its usage: {self._tail!r}")
        return int(found[1])


def body_of(salt: int, new_tokens: int, options: dict[str, Any]) -> bytes:
    """A request; prompts differ from the first token on, so that no prefix is cached."""
    fixed = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    prompt = [(7919 * salt + 31 * i) % 250 + 3 for i in range(6)]
    return json.dumps({"prompt": prompt, "max_tokens": new_tokens, **fixed, **options}).encode()


def main() -> None:
    port, number, salt, new_tokens, options = map(json.loads, sys.argv[1:])
    streams = [Stream(port, body_of(salt + i, new_tokens, options)) for i in range(number)]
    selector = selectors.DefaultSelector()
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.process_time()
    for stream in streams:
        stream.send()
        selector.register(stream.socket, selectors.EVENT_READ, stream)
    while selector.get_map():
        for key, _ in selector.select():
            if not key.data.read():
                selector.unregister(key.fileobj)
    print(json.dumps({
        "streams": [(stream.num_tokens(), stream.arrivals) for stream in streams],
        "cpu_s": time.process_time() - began,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
