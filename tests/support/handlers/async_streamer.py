"""An async generator handler."""

import asyncio


async def handle(data, context):
    if data is None:
        return
    for i in range(5):
        await asyncio.sleep(0.01)
        yield [f"{i} " for _ in data]
