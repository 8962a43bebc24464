"""Streams numbers, the second and later ones only once a file exists; notes when nobody listens any more."""

import time
from pathlib import Path


class Streamer:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        order = data[0]["body"]
        note = Path(order["note"]) if "note" in order else None
        try:
            for i in range(order["n"]):
                if context.is_cancelled(0):
                    break
                if i == order.get("fail at"):
                    raise RuntimeError("broke in the middle")
                if i == order.get("die at"):
                    import os

                    os._exit(9)
                yield f"{i} {time.monotonic()}\n"
                time.sleep(order.get("pause", 0))
                while "until" in order and not Path(order["until"]).exists():
                    time.sleep(0.01)
        finally:
            if note:
                note.write_text("ended early" if i < order["n"] - 1 else "ran to its end")
