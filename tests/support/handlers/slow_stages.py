"""Does in its stages what the requests ask for, and takes its time."""

import gc
import json
import os
import signal
import time
from pathlib import Path


class SlowStages:
    def initialize(self, context):
        pass

    def preprocess(self, data):
        bodies = [row["body"] for row in data]
        orders = [body if isinstance(body, dict) else json.loads(body) for body in bodies]
        time.sleep(max(order.get("prepare_s", 0) for order in orders))
        return orders

    def inference(self, orders):
        time.sleep(max(order.get("compute_s", 0) for order in orders))
        for order in orders:
            if order.get("collect"):
                garbage = [[i] for i in range(300_000)]  # enough for a collection that can be seen
                gc.collect()
                del garbage
            if "die_once" in order and not Path(order["die_once"]).exists():
                Path(order["die_once"]).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if order.get("fail"):
                raise ValueError("as asked")
        return orders

    def postprocess(self, orders):
        return [order.get("name", "") for order in orders]

    def handle(self, data, context):
        return self.postprocess(self.inference(self.preprocess(data)))
