"""Has three stages, and no torch."""

import time


class Staged:
    def initialize(self, context):
        self.device = "cpu"
        time.sleep(0.02)

    def preprocess(self, data):
        return [row["body"]["x"] for row in data]

    def inference(self, data):
        time.sleep(0.01)
        return {"doubled": [2 * x for x in data]}

    def postprocess(self, data):
        return [{"answer": x} for x in data["doubled"]]

    def handle(self, data, context):
        return self.postprocess(self.inference(self.preprocess(data)))
