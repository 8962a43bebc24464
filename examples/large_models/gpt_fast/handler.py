"""The handler of the example: the built-in GptHandler. Override its methods here to change a stage."""

from flambeau.handlers.gpt import GptHandler as GptHandler
