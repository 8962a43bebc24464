"""Takes its time to load."""

import os
import time


class SlowStart:
    def initialize(self, context):
        time.sleep(float(os.environ.get("SLOW_START_S", "1")))
        while not os.path.exists(os.environ.get("SLOW_START_UNTIL", "/")):
            time.sleep(0.01)

    def handle(self, data, context):
        return ["at last" for _ in data]
