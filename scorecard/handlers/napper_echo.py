"""Answers with what it got after 5 ms, so that one worker has a known capacity."""

import time


class NapperEcho:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        time.sleep(0.005)
        return [{"row": {"body": ["bytearray", bytes(row["body"]).decode("latin-1")]}} for row in data]
