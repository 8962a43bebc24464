"""A batch in which some replies stream and some do not."""


class Mixed:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return [self.count(row["body"]) if isinstance(row["body"], int) else row["body"] for row in data]

    def count(self, n):
        for i in range(n):
            if i == 13:
                raise RuntimeError("unlucky")
            yield f"{i},"
