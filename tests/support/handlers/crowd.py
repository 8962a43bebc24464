"""Computes or waits for a while, and says from when to when."""

import time


def handle(data, context):
    if data is None:
        return None
    order = data[0]["body"]
    began = time.monotonic()
    if order["do"] == "wait":
        time.sleep(order["s"])
    else:
        deadline = time.thread_time() + order["s"]
        while time.thread_time() < deadline:
            sum(range(1000))
    return [{"from": began, "to": time.monotonic()}]
