"""Keeps a list of items for each session."""


class Cart:
    def initialize(self, context):
        self.items = {}

    def handle(self, data, context):
        return [self.add(row["body"]["item"], i, context) for i, row in enumerate(data)]

    def add(self, item, i, context):
        session = context.get_sequence_id(i)
        items = self.items.setdefault(session, [])
        items.append(item)
        context.set_response_header(i, context.header_key_sequence_id, session)
        return {"items": len(items), "last": item}
