"""A product whose weight is split over the ranks of a group, and accidents on one of them."""

import os
import time

import torch
from torch import distributed

from ts.handler_utils.utils import send_intermediate_predict_response


class TensorParallelHandler:
    def initialize(self, context):
        self.context = context
        if os.environ.get("LOAD_FAILS_ON_RANK") == os.environ["RANK"]:
            raise ValueError("this rank has no weights")
        distributed.init_process_group("gloo")
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        torch.manual_seed(0)
        whole = torch.arange(16.0).reshape(4, 4)
        self.rows = slice(self.rank * 4 // self.world, (self.rank + 1) * 4 // self.world)
        self.weight = whole[self.rows]

    def handle(self, rows, context):
        orders = [row.get("body") for row in rows]
        replies = [self.answer(order) for order in orders]
        return replies

    def answer(self, order):
        if "variables" in order:
            return {name: os.environ.get(name) for name in order["variables"]}
        if order.get("rank") == self.rank:
            self.have_an_accident(order["accident"])
        if order.get("streams"):
            send_intermediate_predict_response(["first;"], self.context.request_ids, "", 200, self.context)
        part = torch.tensor(order["x"])[self.rows] @ self.weight
        time.sleep(order.get("sleep_s", 0))
        distributed.all_reduce(part)
        return {"product": part.tolist(), "gpu_id": self.context.system_properties["gpu_id"], "pid": os.getpid()}

    def have_an_accident(self, kind):
        if kind == "exit":
            os._exit(3)
        raise ValueError(f"rank {self.rank} cannot do this")
