"""An echo that imports no torch, for start-up time and memory: what is left is the server's own."""

import json
from typing import Any


class EchoHandler:
    """Answers every JSON body with its id."""

    def initialize(self, context: Any) -> None:
        pass

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        bodies = [row["body"] if row.get("body") is not None else row["data"] for row in data]
        items = [body if isinstance(body, dict) else json.loads(bytes(body)) for body in bodies]
        return [{"id": item["id"]} for item in items]
