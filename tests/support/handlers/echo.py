"""Answers with what it got, and how it got it."""


class Echo:
    def initialize(self, context):
        self.context = context

    def handle(self, data, context):
        if any(row.get("body") == "raise" for row in data):
            raise ValueError("one of you said raise")
        return [{"row": {k: shown(v) for k, v in row.items()}, "batch": len(data)} for row in data]


def shown(value):
    if isinstance(value, (bytes, bytearray)):
        return [type(value).__name__, bytes(value).decode("latin-1")]
    return value
