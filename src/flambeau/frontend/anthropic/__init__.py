"""Anthropic's Messages API for the models of this server, as a translation to chats."""
