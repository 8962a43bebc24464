"""OpenAI's Responses API for the models of this server, as a translation to chats."""
