"""Embeds texts by the letters in them."""

import string


class Letters:
    abilities = ("embed",)

    def initialize(self, context):
        pass

    def handle(self, data, context):
        return [self.answer(row["body"]) for row in data]

    def answer(self, body):
        texts = body["input"] if isinstance(body, dict) else body
        vectors = [[float(text.lower().count(letter)) for letter in string.ascii_lowercase] for text in texts]
        is_counted = isinstance(body, dict) and body.get("usage")
        return {"embeddings": vectors, "num_tokens": len(texts)} if is_counted else vectors
