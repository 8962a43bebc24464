"""Stateful: answers each number with the sum of its sequence so far."""

import os


class RunningSums:
    def initialize(self, context):
        self.sums = {}

    def handle(self, data, context):
        replies = []
        for i, row in enumerate(data):
            sequence = context.get_sequence_id(i)
            self.sums[sequence] = self.sums.get(sequence, 0) + int(row["data"])
            replies.append(f"{self.sums[sequence]} {os.getpid()}")
        return replies
