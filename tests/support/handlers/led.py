"""A handler of a pipeline-parallel model: only rank 0 is asked."""

import os


class LedHandler:
    def initialize(self, context):
        self.calls = 0

    def handle(self, rows, context):
        self.calls += 1
        return [{"rank": os.environ["RANK"], "calls": self.calls} for _ in rows]
