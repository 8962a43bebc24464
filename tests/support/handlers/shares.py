"""Answers each row it is given with the row, and says how many came together."""


class Shares:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return [[row["data"] if isinstance(row, dict) else row, len(data)] for row in data]
