"""The APIs of the server: HTTP, OpenAI, gRPC. They translate requests into calls of Server."""
