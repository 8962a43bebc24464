"""Does what the field `order` of a request says, for calls that come as a map of bytes."""

import json
import time
from pathlib import Path


class Orders:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        if not data[0]:
            return [{"I am": "told"}]
        return [self.obey(row, context, i) for i, row in enumerate(data)]

    def obey(self, row, context, i):
        if "order" not in row:
            return {name: [type(value).__name__, bytes(value).decode("latin-1")] for name, value in row.items()}
        order = json.loads(row["order"])
        match order["do"]:
            case "answer":
                return order["value"]
            case "told":
                return {"headers": context.get_all_request_header(i), "types": {k: type(row[k]).__name__ for k in row}}
            case "length":
                return {name: len(value) for name, value in row.items()}
            case "status":
                context.set_response_status(order["code"], "as you like", i)
                return order.get("text", "not good")
            case "raise":
                raise ValueError("the secret is 42")
            case "refuse":
                from ts.utils.util import PredictionException

                raise PredictionException("not like this", order["code"])
            case "wait":
                Path(order["path"] + ".begun").touch()
                while not Path(order["path"]).exists() and not context.is_cancelled(i):
                    time.sleep(0.005)
                return "waited"
            case "note":
                Path(order["path"]).touch()
                return "noted"
            case "big":
                return b"x" * order["bytes"]
            case "exit":
                import os

                os._exit(3)
            case "stream":
                return self.stream(order, context, i)
        return None

    def stream(self, order, context, i):
        sent = 0
        try:
            while sent < order["n"]:
                if order.get("fail at") == sent:
                    raise RuntimeError("broke in the middle")
                yield (f"{sent} " if "bytes" not in order else b"x" * order["bytes"])
                sent += 1
                time.sleep(order.get("pause", 0))
        finally:
            if "note" in order:
                Path(order["note"]).write_text("ran to its end" if sent == order["n"] else "ended early")
