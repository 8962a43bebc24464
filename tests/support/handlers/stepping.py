"""Generates piece by piece: each call is a step for every request that is not finished."""

import functools
import os
import time
from pathlib import Path


class Stepping:
    def initialize(self, context):
        self.states = {}
        self.calls = 0

    def handle(self, data, context):
        self.calls += 1
        ids = [*context.request_ids.values()]
        if context.get_request_header(0, "describe"):
            return [{"open": len(self.states), "calls": self.calls, "rows": len(data)}]
        replies = [
            self.step(i, name, row, len(data), context) for i, (name, row) in enumerate(zip(ids, data, strict=True))
        ]
        context.stopping_criteria = [functools.partial(self.is_final, name) for name in ids]
        time.sleep(max(self.states[name]["pause"] for name in ids))
        return replies

    def is_final(self, name, result):
        state = self.states[name]
        state["left"] -= 1
        if state["left"] > 0:
            return False
        del self.states[name]
        return None if state["whole"] else True

    def step(self, i, name, row, batch, context):
        is_new = name not in self.states
        if is_new:
            order = row["body"]
            self.states[name] = {
                "order": order,
                "left": order.get("n", 1),
                "pause": order.get("pause", 0.0),
                "whole": order.get("whole", False),
                "step": 0,
            }
        else:
            assert row == {}, row
            assert context.get_request_header(i, "x-mine") == self.states[name]["order"].get("mine")
        state = self.states[name]
        order, state["step"] = state["order"], state["step"] + 1
        if order.get("note"):
            Path(order["note"]).touch()
        if state["step"] == order.get("raise"):
            raise ValueError("as told")
        if state["step"] == order.get("exit"):
            os._exit(4)
        if order.get("status"):
            context.set_response_status(order["status"], "As You Like", i)
        if state["step"] == order.get("end_step"):
            context.set_response_header(i, context.header_key_sequence_end, context.get_sequence_id(i))
        if context.get_sequence_id(i):
            context.set_response_header(i, context.header_key_sequence_id, context.get_sequence_id(i))
        return f'{{"step": {state["step"]}, "batch": {batch}, "call": {self.calls}, "pid": {os.getpid()}}}\n'
