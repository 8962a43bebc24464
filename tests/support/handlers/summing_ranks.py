"""The same product and accidents as of tensor_parallel, with ranks that meet over plain sockets: no torch to import."""

import json
import os
import socket
import time

from ts.handler_utils.utils import send_intermediate_predict_response

ADDRESS = "127.0.0.1"
WEIGHT = [[float(4 * row + column) for column in range(4)] for row in range(4)]


class Peer:
    """The other of two ranks. What is asked of it fails if it ends."""

    def __init__(self, rank, port):
        if rank == 0:
            with socket.create_server((ADDRESS, port)) as listening:
                listening.settimeout(60)
                self.stream = listening.accept()[0].makefile("rw")
        else:
            self.stream = self.dial(port).makefile("rw")

    def dial(self, port):
        while True:
            try:
                return socket.create_connection((ADDRESS, port))
            except ConnectionRefusedError:  # rank 0 is not there yet
                time.sleep(0.02)

    def sum(self, numbers):
        """Of both ranks; waits for the other one."""
        self.stream.write(json.dumps(numbers) + "\n")
        self.stream.flush()
        line = self.stream.readline()
        if not line:
            raise ConnectionError("the other rank has gone")
        return [ours + theirs for ours, theirs in zip(numbers, json.loads(line), strict=True)]


class SummingRanksHandler:
    def initialize(self, context):
        self.context = context
        if os.environ.get("LOAD_FAILS_ON_RANK") == os.environ["RANK"]:
            raise ValueError("this rank has no weights")
        self.rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
        self.peer = Peer(self.rank, port)
        self.rows = slice(self.rank * 2, self.rank * 2 + 2)

    def handle(self, rows, context):
        return [self.answer(row.get("body")) for row in rows]

    def answer(self, order):
        if order.get("rank") == self.rank:
            self.have_an_accident(order["accident"])
        if order.get("streams"):
            send_intermediate_predict_response(["first;"], self.context.request_ids, "", 200, self.context)
        numbers, weights = order["x"][self.rows], WEIGHT[self.rows]
        part = [sum(x * row[i] for x, row in zip(numbers, weights, strict=True)) for i in range(4)]
        time.sleep(order.get("sleep_s", 0))
        return {"product": self.peer.sum(part), "pid": os.getpid()}

    def have_an_accident(self, kind):
        if kind == "exit":
            os._exit(3)
        raise ValueError(f"rank {self.rank} cannot do this")
