"""Fails as its request says, in the ways that have a status and a text of their own."""

import os

from ts.utils.util import PredictionException


class Erring:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        order = bytes(data[0]["body"]).decode()
        if order == "memory":
            raise MemoryError
        if order == "cuda":
            raise RuntimeError("CUDA error: out of memory")
        if order == "cuda code":
            raise RuntimeError("CUDA error: device-side assert triggered")
        if order == "prediction":
            raise PredictionException("no such thing", 418)
        if order == "too large":
            raise PredictionException("too large for me", 413)
        if order == "raise":
            raise ValueError("a secret")
        if order == "no list":
            return "text"
        if order == "mismatch":
            return ["one", "two", "three"]
        if order == "object":
            return [object()]
        if order == "die":
            os._exit(1)
        if order == "own status":
            context.set_response_status(507, "Mine", 0)
            return ["Invalid response"]
        return ["fine"]
