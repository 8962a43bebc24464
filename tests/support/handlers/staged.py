"""Each stage takes the time the request names, and says which batch it saw."""

import time

from flambeau.errors import BadRequest
from flambeau.handlers.base import BaseHandler


class Staged(BaseHandler):
    def initialize(self, context):
        self.initialized = True

    def preprocess(self, data):
        bodies = [row["body"] for row in data]
        began = time.monotonic()
        time.sleep(max(body.get("prepare_s", 0) for body in bodies))
        if any(body.get("leave") for body in bodies):
            raise SystemExit(3)
        if any(body.get("bad") for body in bodies):
            raise BadRequest("it says that it is bad")
        return [{**body, "prepared": f"{began} {time.monotonic()}"} for body in bodies]

    def inference(self, data):
        began = time.monotonic()
        time.sleep(max(body.get("compute_s", 0) for body in data))
        if any(body.get("exit") for body in data):
            import os

            os._exit(9)
        computed = f"{began} {time.monotonic()}"
        return [{"answer": body["number"] * 2, "prepared": body["prepared"], "computed": computed} for body in data]

    def postprocess(self, data):
        for i, result in enumerate(data):
            self.context.set_response_header(i, "x-seen", self.context.get_request_id(i))
            self.context.set_response_header(i, "x-prepared", result["prepared"])
            self.context.set_response_header(i, "x-computed", result["computed"])
        return [result["answer"] for result in data]
