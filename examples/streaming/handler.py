"""Sends one line for each word of a text, as soon as it is ready."""

import time


class Words:
    example = {"text": "one line for each word"}

    def initialize(self, context):
        pass

    def handle(self, data, context):
        for number, word in enumerate(data[0]["body"]["text"].split(), start=1):
            yield f"{number} {word}\n"
            time.sleep(0.05)  # the work for the next word
