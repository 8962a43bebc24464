"""Stateful: adds up the numbers of each sequence; does odd things when it is told to."""

import os
import time
from pathlib import Path


class Summing:
    def initialize(self, context):
        self.sums = {}
        self.calls = 0

    def handle(self, data, context):
        self.calls += 1
        orders = [row["body"] for row in data]
        return [self.obey(i, order, len(data), context) for i, order in enumerate(orders)]

    def obey(self, i, order, batch, context):
        sequence = context.get_sequence_id(i)
        context.set_response_header(i, context.header_key_sequence_id, sequence)
        if order.get("exit"):
            os._exit(3)
        if order.get("note"):
            Path(order["note"]).touch()
        time.sleep(order.get("s", 0))
        while order.get("until") and not Path(order["until"]).exists():
            time.sleep(0.01)
        self.sums[sequence] = self.sums.get(sequence, 0) + order.get("add", 0)
        if order.get("raise"):
            raise ValueError("as told")
        if order.get("end"):
            context.set_response_header(i, context.header_key_sequence_end, order["end"])
        return {
            "sum": self.sums[sequence],
            "sequence": sequence,
            "start": context.get_request_header(i, context.header_key_sequence_start),
            "batch": batch,
            "pid": os.getpid(),
            "calls": self.calls,
            "names": [context.header_key_sequence_id, context.header_key_sequence_end],
        }
