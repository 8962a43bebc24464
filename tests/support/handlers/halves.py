"""Sends a chunk to one request after the other, each named by its id, as micro-batching handlers do."""

from ts.handler_utils.utils import send_intermediate_predict_response


class Halves:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        for i in reversed(range(len(data))):
            text = data[i]["body"].decode()
            send_intermediate_predict_response(
                [f"first {text},"], {0: context.get_request_id(i)}, "Intermediate Prediction success", 200, context
            )
        return [f"last of {len(data)}"] * len(data)
