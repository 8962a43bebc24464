"""A worker process: connect to the server, load one model, run batches until told to stop.

python -m flambeau.worker --fd N                (a socket inherited from the server)
python -m flambeau.worker --connect HOST:PORT   (TCP; the token is in FLAMBEAU_WORKER_TOKEN)
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading

from flambeau.wire.channel import WorkerChannel
from flambeau.worker.loop import serve

MAX_FRAME_BYTES = (1 << 32) - 1  # what the server sends is limited there


def main(arguments: list[str]) -> int:
    """Run the worker; the exit status is 0 when the server stopped it."""
    faulthandler.enable(all_threads=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Bare messages: the server adds the time and the name of the worker.
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    sock = connect(dict(zip(arguments[::2], arguments[1::2], strict=True)))
    threading.Thread(target=exit_with_server, args=(sock.fileno(),), daemon=True, name="exit-with-server").start()
    return serve(WorkerChannel(sock, MAX_FRAME_BYTES))


def connect(options: dict[str, str]) -> socket.socket:
    """The socket to the server, as the command line names it."""
    if "--fd" in options:
        return socket.socket(fileno=int(options["--fd"]))
    host, _, port = options["--connect"].rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(os.environ.pop("FLAMBEAU_WORKER_TOKEN").encode())
    return sock


def exit_with_server(fd: int) -> None:
    """End this process when the server is gone, even while the handler is busy: nobody waits for its answer."""
    poller = select.poll()
    poller.register(fd, getattr(select, "POLLRDHUP", 0))
    poller.poll()
    if os.getpgrp() == os.getpid():  # with whatever the handler has started
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
