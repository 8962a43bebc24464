"""Answers named tensors with themselves, in NumPy's types; `tell` has it say what it got."""

import numpy as np


class Tensors:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return [self.answer(row) for row in data]

    def answer(self, row):
        if "datatype" not in row:
            return {f"{name} again": np.asarray(value, dtype="float32") for name, value in row.items()}
        if row["name"] == "tell":
            value = row["data"]
            return {"type": type(value).__name__, "shape": row["shape"], "parameters": row["parameters"]}
        if row["datatype"] == "BYTES":
            return row["data"]
        kind = {"BOOL": "bool", "FP16": "float16", "FP32": "float32", "FP64": "float64"}.get(row["datatype"])
        return np.asarray(row["data"], dtype=kind or row["datatype"].lower())
