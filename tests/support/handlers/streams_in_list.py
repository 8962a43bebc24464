"""A batch in which some replies stream and some do not."""


class Mixed:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        self.context = context
        return [self.count(row["body"]) if isinstance(row["body"], int) else row["body"] for row in data]

    def count(self, n):
        self.context.set_response_header(0, "X-From", "inside")
        for i in range(n):
            if i == 13:
                raise RuntimeError("unlucky")
            yield f"{i},"
