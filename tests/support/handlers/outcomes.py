"""Does what its request says: every way to answer and to fail that TorchServe's handlers have."""

import torch

from ts.handler_utils.utils import send_intermediate_predict_response
from ts.utils.util import PredictionException


class Outcomes:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        order = data[0].get("body")
        return getattr(self, order["do"])(context, **order.get("with", {}))

    def value(self, context, value=None):
        return [value]

    def tensor(self, context):
        return [torch.arange(3)]

    def numbers(self, context):
        return [{"nan": float("nan"), "inf": float("inf"), "small": 1e-7, "list": [1, 2.5, True, None], "é": "é"}]

    def binary(self, context):
        return [bytearray(b"\x00\xff")]

    def no_list(self, context):
        return "text"

    def too_many(self, context):
        return ["a", "b"]

    def not_serializable(self, context):
        return [object()]

    def prediction_exception(self, context, message="no", code=500):
        raise PredictionException(message, code)

    def error(self, context, message="no"):
        raise RuntimeError(message)

    def memory(self, context):
        raise MemoryError("none left")

    def status(self, context, code=200, phrase="", body="body"):
        context.set_response_status(code, phrase)
        return [body]

    def all_status(self, context):
        context.set_all_response_status(207, "Many")
        return [{"code": context.get_response_status(0)[0]}]

    def headers(self, context):
        context.set_response_content_type(0, "text/css")
        context.set_response_header(0, "X-Made", "here")
        return [context.get_response_headers(0)]

    def told(self, context):
        known = ("url_path", "explain", "body", "X-Mixed")
        headers = {name: context.get_request_header(0, name) for name in known}
        properties = {k: v for k, v in context.system_properties.items() if k not in ("model_dir", "server_version")}
        return [{"headers": headers, "properties": properties, "name": context.model_name}]

    def stream(self, context, chunks=()):
        for chunk in chunks:
            send_intermediate_predict_response([chunk], context.request_ids, "so far", 200, context)
        return ["end"]
