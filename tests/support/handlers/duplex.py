"""Streams for one request of a sequence until another request of the same sequence arrives."""

import time


class Duplex:
    def initialize(self, context):
        context.cache = {}
        self.is_stopped = {}

    def handle(self, data, context):
        ids = [context.get_request_id(i) for i in range(len(data))]
        replies = []
        for i, (name, row) in enumerate(zip(ids, data, strict=True)):
            sequence = context.get_sequence_id(i)
            if name not in context.cache:
                context.cache[name] = row["body"]
                self.is_stopped[sequence] = row["body"] == "stop"
            replies.append("stopping\n" if context.cache[name] == "stop" else f"heard {context.cache[name]}\n")
        ends = [
            context.cache[name] == "stop" or self.is_stopped[context.get_sequence_id(i)] for i, name in enumerate(ids)
        ]
        context.stopping_criteria = [lambda result, is_over=is_over: is_over for is_over in ends]
        time.sleep(0.01)
        return replies
