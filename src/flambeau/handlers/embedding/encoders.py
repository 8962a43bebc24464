"""Encoders of padded texts: torch for safetensors, onnxruntime for ONNX; neither imports the other."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from flambeau.errors import HandlerError
from flambeau.handlers.device import choose_threads
from flambeau.handlers.embedding.pooling import Mode, pool
from flambeau.handlers.embedding.sentence_model import SentenceModel
from flambeau.handlers.onnx.npy import Array


class Encoder(Protocol):
    """Computes the vectors of texts that are padded to one length."""

    def embed(self, ids: Array, mask: Array) -> Array:
        """Token ids and a mask of the same shape → one vector per text."""


def load_encoder(model: SentenceModel, gpu_id: int | None) -> Encoder:
    if model.weights.suffix == ".onnx":
        return OnnxEncoder(model.weights, model.modes, gpu_id)
    return TorchEncoder(model, gpu_id)


class TorchEncoder:
    """A BERT model in torch, on the worker's device."""

    def __init__(self, model: SentenceModel, gpu_id: int | None) -> None:
        from flambeau.handlers.device import choose_device
        from flambeau.handlers.embedding.bert import load_bert, read_config

        self.device, _ = choose_device(gpu_id)
        self.bert = load_bert(model.weights, read_config(model.config), self.device)
        self.modes = model.modes

    def embed(self, ids: Array, mask: Array) -> Array:
        import torch

        with torch.inference_mode():
            is_token = torch.from_numpy(mask).to(self.device)
            hidden = self.bert(torch.from_numpy(ids).to(self.device), None if mask.all() else is_token)
            vectors: Array = torch.cat(pool(hidden, is_token.float(), self.modes), 1).cpu().numpy()
            return vectors


class OnnxEncoder:
    """An exported encoder; token vectors are pooled here, unless the model returns sentence vectors itself."""

    def __init__(self, path: Path, modes: tuple[Mode, ...], gpu_id: int | None) -> None:
        from flambeau.handlers.onnx.session import open_session

        self.session = open_session(path, use_cuda=gpu_id is not None, threads=choose_threads(), gpu_id=gpu_id or 0)
        self.names = {spec.name for spec in self.session.get_inputs()}
        if unknown := self.names - {"input_ids", "attention_mask", "token_type_ids"}:
            raise HandlerError(f"{path.name} takes {', '.join(sorted(unknown))}, which a tokenizer does not provide")
        outputs = [output.name for output in self.session.get_outputs()]
        self.output = "sentence_embedding" if "sentence_embedding" in outputs else outputs[0]
        self.modes = modes

    def embed(self, ids: Array, mask: Array) -> Array:
        inputs = {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": np.zeros_like(ids)}
        [result] = self.session.run([self.output], {name: inputs[name] for name in self.names})
        if result.ndim == 2:
            return np.asarray(result, np.float32)
        return np.concatenate(pool(result.astype(np.float32), mask.astype(np.float32), self.modes), 1)
