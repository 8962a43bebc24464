"""Hangs, or is slow, in the way that the request names."""

import ctypes
import os
import re
import signal
import threading
import time


class Hanging:
    def initialize(self, context):
        self.lock = threading.Lock()
        time.sleep((context.model_yaml_config or {}).get("load_s", 0))

    def handle(self, data, context):
        return [self.obey(row["body"]) for row in data]

    def obey(self, order):
        seconds = order.get("s", 10)
        match order["do"]:
            case "answer":
                pass
            case "loop":
                while True:
                    pass
            case "count":
                number = 0
                while True:
                    number += 1
            case "backtrack":  # in C, with the interpreter's lock
                re.match("(a+)+$", "a" * 60 + "b")
            case "lock":
                self.lock.acquire()
                self.lock.acquire()
            case "keep the interpreter":  # and wait for a lock
                library, semaphore = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
                library.sem_init(semaphore, 0, 0)
                library.sem_wait(semaphore)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                os._exit(3)
            case "sleep":
                time.sleep(seconds)
            case "compute":
                end = time.perf_counter() + seconds
                while time.perf_counter() < end:
                    pass
            case "allocate":
                end = time.perf_counter() + seconds
                while time.perf_counter() < end:
                    bytes(1 << 22)
            case "wait":
                threading.Event().wait(seconds)
            case "wait for a thread":
                thread = threading.Thread(target=time.sleep, args=(seconds,))
                thread.start()
                thread.join()
        return {"pid": os.getpid()}
