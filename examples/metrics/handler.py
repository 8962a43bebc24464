"""Counts words, and reports metrics of its own."""


class Counter:
    example = {"text": "to be or not to be"}

    def initialize(self, context):
        pass

    def handle(self, data, context):
        counts = [len(row["body"]["text"].split()) for row in data]
        context.metrics.add_counter("Words", sum(counts))
        context.metrics.add_size("LargestText", max(len(row["body"]["text"]) for row in data), unit="B")
        return counts
