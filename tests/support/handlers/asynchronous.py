"""An `async def` handler: many requests at a time in one worker."""

import asyncio
import os


class Asynchronous:
    def initialize(self, context):
        self.running = 0
        self.most = 0

    async def handle(self, data, context):
        self.running += 1
        self.most = max(self.most, self.running)
        order = data[0]["body"]
        await asyncio.sleep(order.get("s", 0))
        while self.most < order.get("crowd", 0):  # until so many have run at a time
            await asyncio.sleep(0.01)
        self.running -= 1
        if order.get("exit"):
            os._exit(6)
        if order.get("raise"):
            raise ValueError("as told")
        return [{"most": self.most, "id": context.get_request_id(0), "i": order.get("i")}]
