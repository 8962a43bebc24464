"""Does whatever the request says, mostly wrong things."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class Faulty:
    def initialize(self, context):
        self.calls = 0

    def handle(self, data, context):
        self.calls += 1
        return (
            [self.obey(row["body"], context) for row in data]
            if data[0]["body"] != {"do": "count"}
            else self.count(data)
        )

    def count(self, data):
        return ["one", "too", "many"]

    def obey(self, order, context):
        match order.get("do"):
            case "answer":
                return {"pid": os.getpid(), "value": order.get("value")}
            case "exit":
                print("about to exit", file=sys.stderr if order.get("code", 3) == 3 else sys.stdout)
                os._exit(order.get("code", 3))
            case "segfault":
                ctypes.string_at(0)
            case "kill":
                os.kill(os.getpid(), 9)
            case "hang":
                time.sleep(600)
            case "sleep":
                time.sleep(order["s"])
                return {"slept": order["s"]}
            case "wait":
                Path(order["note"]).touch()
                while not Path(order["until"]).exists():
                    time.sleep(0.01)
                return {"waited": True}
            case "eat":
                hoard = []
                while True:
                    hoard.append(bytearray(b"x" * (16 << 20)))
                    time.sleep(0.005)
            case "let a child eat":
                subprocess.run(
                    [sys.executable, "-c", "import time; h = b'x' * (300 << 20); time.sleep(1000)"], check=True
                )
            case "memory error":
                raise MemoryError
            case "raise":
                raise ValueError("the secret is 42")
            case "long text":
                raise ValueError("x" * 30_000_000)
            case "child":
                child = subprocess.Popen(["sleep", "1000"])
                Path(order["note"]).write_text(str(child.pid))
                os._exit(3)
            case "keep child":
                return {"pid": os.getpid(), "child": subprocess.Popen(["sleep", "1000"]).pid}
            case "keep the lock":  # of the interpreter: no other thread of this process runs
                Path(order["note"]).touch()
                ctypes.PyDLL(None).sleep(1000)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "no content":
                context.set_response_status(204)
                return "nobody reads this"
            case "odd text":
                raise ValueError("a lone surrogate: \udcff")
            case "status as text":
                context.set_response_status("418", 7)
                return "odd"
            case "no json":
                return object()
            case "not a list":
                return None
            case "print":
                line = "x" * 99
                for _ in range(order["mb"] * 10_000):
                    print(line)
                return "printed"
            case "junk":
                os.write(1, b"\x00\xff\xfe{]junk without end")
                sys.stdout.write("\x1b[31m more junk")
                sys.stdout.flush()
                return "junked"
            case "half frame":
                fd = context.cl_socket._channel.socket.fileno()
                os.write(fd, b"\xff\x00\x00\x00half")
                os._exit(4)
            case "bad frame":
                fd = context.cl_socket._channel.socket.fileno()
                os.write(fd, b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1")
                time.sleep(600)
            case "huge":
                return b"x" * order["bytes"]
            case "sys exit":
                sys.exit(5)
        return None
