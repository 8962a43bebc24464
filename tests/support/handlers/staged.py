"""Each stage takes the time the request names, and says which batch it saw."""

import time

from flambeau.errors import BadRequest
from flambeau.handlers.base import BaseHandler


class Staged(BaseHandler):
    def initialize(self, context):
        self.initialized = True

    def preprocess(self, data):
        bodies = [row["body"] for row in data]
        time.sleep(max(body.get("prepare_s", 0) for body in bodies))
        if any(body.get("leave") for body in bodies):
            raise SystemExit(3)
        if any(body.get("bad") for body in bodies):
            raise BadRequest("it says that it is bad")
        return bodies

    def inference(self, data):
        time.sleep(max(body.get("compute_s", 0) for body in data))
        if any(body.get("exit") for body in data):
            import os

            os._exit(9)
        return [body["number"] * 2 for body in data]

    def postprocess(self, data):
        for i in range(len(data)):
            self.context.set_response_header(i, "x-seen", self.context.get_request_id(i))
        return data
