"""A model that needs as long for eight rows as for one, as on a GPU. It answers with the size of its batch."""

import os
import time


class Batched:
    example = 1

    def initialize(self, context):
        pass

    def handle(self, data, context):
        time.sleep(0.05)
        return [{"batch": len(data), "worker": os.getpid()} for _ in data]
