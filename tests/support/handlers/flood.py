"""Streams as many bytes as the request says: from a generator, or by sending each chunk itself."""

import json


class Flood:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        order = data[0].get("body") or data[0].get("order") or {}
        if isinstance(order, bytes | bytearray):
            order = json.loads(order)
        if order.get("way") == "send":
            return self.send(order, context)
        return self.chunks(order, context)

    def chunks(self, order, context):
        if order.get("events"):
            context.set_response_content_type(0, "text/event-stream")
        for i in range(order["n"]):
            yield chunk(i, order)

    def send(self, order, context):
        for i in range(order["n"]):
            if context.is_cancelled(0):
                break
            context.send([chunk(i, order)])
        return [b"end"]


def chunk(i, order):
    return b"%08d" % i + b"x" * (order["bytes"] - 8)
