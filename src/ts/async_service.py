"""TorchServe's import name for the service around an `async def` handler."""

from flambeau.torchserve.otf.service import AsyncService as AsyncService
