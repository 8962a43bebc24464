"""Does what a request says: streams, sleeps, holds the interpreter's lock, eats memory, prints."""

import ctypes
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path


class Obedient:
    def initialize(self, context):
        self.folder = Path(context.system_properties["model_dir"])

    def handle(self, data, context):
        row = data[0]
        order = row.get("order", row.get("body")) or {"do": "answer"}
        if isinstance(order, bytes | bytearray | str):
            order = json.loads(order)
        if order["do"] == "stream":
            return self.stream(order, context)
        return [self.obey(order)] * len(data)

    def stream(self, order, context):
        for _ in range(order["n"]):
            if context.is_cancelled(0):
                return
            yield b"x" * order["bytes"]
            time.sleep(order.get("pause", 0))

    def obey(self, order):
        match order["do"]:
            case "answer":
                return {"pid": os.getpid()}
            case "sleep":
                time.sleep(order["s"])
                return "slept"
            case "work":
                end = time.perf_counter() + order["s"]
                while time.perf_counter() < end:
                    pass
                return "worked"
            case "hold the lock":
                Path(order["note"]).write_text(str(os.getpid()))
                ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the interpreter's lock
            case "environment":
                return dict(os.environ)
            case "child eats":
                child = multiprocessing.get_context("fork").Process(target=eat, args=(order["mb"],), daemon=True)
                child.start()
                time.sleep(order["s"])
                return "alive"
            case "print":
                for number in range(order["n"]):
                    print(order["line"].replace("NUMBER", str(number)))
                sys.stdout.flush()
                return "printed"
            case "files":
                return sorted(file.name for file in self.folder.rglob("*"))
        return None


def eat(megabytes):
    hoard = [bytearray(b"x" * (1 << 20)) for _ in range(megabytes)]
    time.sleep(600)
    return hoard
