"""HTTP/1.1 on asyncio, and the inference, management and KServe APIs."""
