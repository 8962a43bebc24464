"""Classifies digits: a JSON list of 64 gray values (0 to 16) → the digit and its probability."""

import torch

from flambeau.errors import PredictionException
from flambeau.handlers.base import BaseHandler


class DigitsHandler(BaseHandler):
    def tensor_metadata(self):
        """What KServe's clients send and get."""
        return {
            "inputs": [{"name": "image", "datatype": "FP32", "shape": [64]}],
            "outputs": [
                {"name": "digit", "datatype": "INT64", "shape": [1]},
                {"name": "score", "datatype": "FP64", "shape": [1]},
            ],
        }

    def preprocess(self, data):
        rows = [row.get("data") or row.get("body") for row in data]
        rows = [row[0] if isinstance(row, list) and len(row) == 1 else row for row in rows]  # a batch of one
        if not all(isinstance(row, list) and len(row) == 64 for row in rows):
            raise PredictionException("send a JSON list of 64 numbers from 0 to 16: an 8 by 8 image, row by row", 400)
        return torch.tensor(rows, dtype=torch.float32, device=self.device)

    def postprocess(self, data):
        scores, digits = data.softmax(dim=1).max(dim=1)
        return [
            {"digit": digit, "score": round(score, 4)}
            for digit, score in zip(digits.tolist(), scores.tolist(), strict=True)
        ]
