"""A function handler: called once without data, then with batches."""

state = {}


def handle(data, context):
    if data is None:
        state["model"] = context.model_name
        return None
    return [f"{state['model']}: {row['body']!r}" for row in data]


def entry(data, context):
    return None if data is None else ["entry" for _ in data]
