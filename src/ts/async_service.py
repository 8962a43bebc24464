"""TorchServe's import name for the service around an `async def` handler."""

from flambeau.torchserve.worker_protocol.service import AsyncService as AsyncService
