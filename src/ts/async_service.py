"""What code written for TorchServe imports from `ts.async_service`."""

from __future__ import annotations

import asyncio
import copy
import time
import traceback

from flambeau.torchserve.otf_protocol import PREDICT_MSG, retrieve_msg
from ts.service import Batch, Service, answer, begin, failure


class AsyncService:
    """Answers requests of an `async def` handler as they come, each with a context of its own."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def predict(self, batch: Batch) -> bytearray | None:
        """Call the handler; the answer is encoded, whatever happens."""
        inputs = Service.retrieve_data_for_inference(batch)
        context = copy.deepcopy(self.service.context)
        begin(context, inputs, self.service.cl_socket)
        began = time.perf_counter()
        try:
            assert self.service._entry_point is not None
            result = await self.service._entry_point(inputs[1], context)
        except Exception as error:
            return failure(error, inputs)
        return answer(result, context, inputs, began)

    def run(self) -> str | None:
        """Answer until the peer is gone; what went wrong, if something did."""
        try:
            asyncio.get_event_loop().run_until_complete(self._answer_all())
        except Exception:
            return traceback.format_exc()
        return None

    async def _answer_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                command, batch = await asyncio.to_thread(retrieve_msg, self.service.cl_socket)
                if command != PREDICT_MSG:
                    raise ValueError(f"Unexpected command: {bytes(command)!r}")
                for request in batch:
                    tasks.create_task(self._answer([request]))

    async def _answer(self, batch: Batch) -> None:
        if (response := await self.predict(batch)) is not None:
            self.service.cl_socket.sendall(response)
