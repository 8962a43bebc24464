"""The handler of workloads W1 to W6, packed unchanged into the archive every server gets."""

from pathlib import Path
from typing import Any

import work

try:
    from ts.handler_utils.utils import send_intermediate_predict_response
except ImportError:  # the bare loop runs where no server is installed
    send_intermediate_predict_response = None


class BenchHandler:
    """Hands each batch to the task named in model-config.yaml under `handler: task`."""

    def initialize(self, context: Any) -> None:
        task = context.model_yaml_config["handler"]["task"]
        self.is_stream = task == "stream"
        self.work = work.make_work(task, Path(context.system_properties["model_dir"]))

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        bodies = [row["body"] if row.get("body") is not None else row["data"] for row in data]
        return self.stream(bodies[0], context) if self.is_stream else self.work.run(bodies)

    def stream(self, body: Any, context: Any) -> list[str]:
        """Sends each chunk as soon as it is made, and returns the last one."""
        for chunk, is_last in self.work.chunks(body):
            if is_last:
                return [chunk]
            send_intermediate_predict_response([chunk], context.request_ids, "ok", 200, context)
        return [""]
