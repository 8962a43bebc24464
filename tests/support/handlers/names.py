"""Doubles each tensor; the context must tell their names."""


class Names:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        assert [row["name"] for row in data] == context.input_names
        return [twice(row["data"]) for row in data]


def twice(value):
    return [twice(item) for item in value] if isinstance(value, list) else value * 2
