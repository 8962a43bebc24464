"""What the HTTP and gRPC APIs share: management operations, keys and certificates."""
