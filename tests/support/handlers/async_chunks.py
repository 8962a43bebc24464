"""An `async def` handler that sends chunks in TorchServe's way."""

import asyncio

from ts.handler_utils.utils import send_intermediate_predict_response


class Chunks:
    def initialize(self, context):
        pass

    async def handle(self, data, context):
        text = data[0]["body"].decode()
        for number in range(3):
            await asyncio.sleep(0.01)
            send_intermediate_predict_response([f"{text}{number} "], context.request_ids, "so far", 200, context)
        return ["end"]
