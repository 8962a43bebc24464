"""The gRPC APIs; loaded only where one of their ports is open, for it needs the extra `grpc`."""
