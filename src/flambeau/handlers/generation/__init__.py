"""Text generation behind a handler: settings, requests, replies, and the jobs in the engine."""
