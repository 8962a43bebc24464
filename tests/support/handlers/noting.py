"""Notes in a file who was run, in order; sleeps when told, or works until a file appears."""

import time
from pathlib import Path


def handle(data, context):
    if data is None:
        return None
    replies = []
    for row in data:
        order = row["body"]
        with Path(order["note"]).open("a") as note:
            note.write(f"{order['name']}\n")
        replies.append({"name": order["name"], "batch": len(data)})
    time.sleep(max(row["body"].get("s", 0) for row in data))
    while any(gate and not Path(gate).exists() for gate in (row["body"].get("until") for row in data)):
        time.sleep(0.01)
    return replies
