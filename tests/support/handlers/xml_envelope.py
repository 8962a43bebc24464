"""An envelope of a model's own: text in, text out, each between tags."""

from ts.torch_handler.request_envelope.base import BaseEnvelope


class XmlEnvelope(BaseEnvelope):
    def parse_input(self, data):
        return [bytes(row["body"]).decode().removeprefix("<a>").removesuffix("</a>") for row in data]

    def format_output(self, data):
        return [f"<b>{item}</b>" for item in data]
