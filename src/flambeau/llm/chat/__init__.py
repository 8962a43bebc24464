"""What models write in a chat: reasoning, answers and tool calls, in the notation of each family of models."""
