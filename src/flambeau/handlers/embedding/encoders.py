"""Encoders: what computes the vectors of texts that are padded to one length."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flambeau.errors import HandlerError
from flambeau.handlers.device import choose_threads
from flambeau.handlers.embedding.published_configs import known_config
from flambeau.handlers.embedding.sentence_model import STATIC, Mode, SentenceModel, pool
from flambeau.handlers.embedding.vector_steps import read_tensors
from flambeau.handlers.onnx.npy import Array

logger = logging.getLogger(__name__)

ENCODERS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
DECODERS = ("llama", "mistral", "qwen2", "qwen3")  # which the engine may compute


class Encoder(Protocol):
    """Computes the vectors of texts that are padded to one length."""

    def embed(self, ids: Array, mask: Array, is_pooled: Array | None = None) -> Array:
        """Token ids and a mask of the same shape → one vector per text; `is_pooled` leaves out tokens of a prompt."""


def load_encoder(model: SentenceModel, gpu_id: int | None) -> Encoder:
    if model.config.get("model_type") == STATIC:
        return StaticEncoder(model.weights)
    if model.weights.suffix == ".onnx":
        return OnnxEncoder(model.weights, model.modes, gpu_id)
    if model.weights.suffix in (".safetensors", ".json") and model.config.get("model_type") in DECODERS:
        from flambeau.handlers.embedding.decoder import DecoderEncoder, can_embed

        if can_embed(model.config, model.weights.parent):
            return DecoderEncoder(model, gpu_id)
    is_bert = model.config.get("model_type") == "bert" and model.weights.suffix == ".safetensors"
    return TorchEncoder(model, gpu_id) if is_bert else PretrainedEncoder(model, gpu_id)


def pool_tensors(hidden: Any, is_token: Any, modes: Sequence[Mode], is_pooled: Array | None) -> Array:
    """The pooled vectors of torch's tensors."""
    import torch

    pooled = None if is_pooled is None else torch.from_numpy(is_pooled).to(hidden.device).float()
    vectors: Array = torch.cat(pool(hidden, is_token.float(), modes, pooled), 1).cpu().numpy()
    return vectors


class TorchEncoder:
    """A BERT model in torch, on the worker's device."""

    def __init__(self, model: SentenceModel, gpu_id: int | None) -> None:
        from flambeau.handlers.device import choose_device
        from flambeau.handlers.embedding.bert import load_bert, read_config

        self.device, _ = choose_device(gpu_id)
        self.bert = load_bert(model.weights, read_config(model.config), self.device)
        self.modes = model.modes

    def embed(self, ids: Array, mask: Array, is_pooled: Array | None = None) -> Array:
        import torch

        with torch.inference_mode():
            is_token = torch.from_numpy(mask).to(self.device)
            hidden = self.bert(torch.from_numpy(ids).to(self.device), None if mask.all() else is_token)
            return pool_tensors(hidden, is_token, self.modes, is_pooled)


class PretrainedEncoder:
    """Any other encoder, built by transformers."""

    def __init__(self, model: SentenceModel, gpu_id: int | None) -> None:
        from flambeau.handlers.device import choose_device
        from flambeau.handlers.loaders.pretrained import Runtime

        self.device, _ = choose_device(gpu_id)
        if code := (model.config.get("auto_map") or {}).get("AutoModel"):
            logger.warning(
                "config.json names code of the repository (%s), which is not run: transformers' own network of type %s "
                "computes the vectors. Compare a few with those of the model's authors",
                code,
                model.config.get("model_type"),
            )
        self.model = Runtime(folder=model.weights.parent, device=self.device).load_model(
            class_of(model.config), config=known_config(model.config)
        )
        self.modes = model.modes

    def embed(self, ids: Array, mask: Array, is_pooled: Array | None = None) -> Array:
        import torch

        with torch.inference_mode():
            is_token = torch.from_numpy(mask).to(self.device)
            result = self.model(input_ids=torch.from_numpy(ids).to(self.device), attention_mask=is_token.long())
            hidden = result.last_hidden_state.float()
            return pool_tensors(hidden, is_token, self.modes, is_pooled)


def class_of(config: Mapping[str, Any]) -> str:
    """The class of transformers that computes the vectors: of T5's networks, the encoder alone."""
    return ENCODERS.get(str(config.get("model_type")), "AutoModel")


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

    def embed(self, ids: Array, mask: Array, is_pooled: Array | None = None) -> Array:
        inputs = {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": np.zeros_like(ids)}
        [result] = self.session.run([self.output], {name: inputs[name] for name in self.names})
        if result.ndim == 2:
            if is_pooled is not None:
                raise HandlerError("the ONNX file pools the tokens of prompts, which the pooling config leaves out")
            return np.asarray(result, np.float32)
        pooled = None if is_pooled is None else is_pooled.astype(np.float32)
        return np.concatenate(pool(result.astype(np.float32), mask.astype(np.float32), self.modes, pooled), 1)


class StaticEncoder:
    """A table with a vector for each token: a text has their mean. It needs no torch."""

    def __init__(self, path: Path) -> None:
        tensors = read_tensors(path.parent)
        table = tensors.get("embedding.weight", tensors.get("embeddings"))
        if table is None:
            raise HandlerError(f"{path.name} has no embedding.weight; it has {', '.join(tensors)}")
        if "embeddings" in tensors:  # of model2vec: rows that tokens share, and a weight of each token
            table = table[tensors["mapping"].astype(np.int64)] if "mapping" in tensors else table
            table = table * tensors["weights"][:, None] if "weights" in tensors else table
        self.table_VD: Array = table

    def embed(self, ids: Array, mask: Array, is_pooled: Array | None = None) -> Array:
        total_BD = (self.table_VD[ids] * mask[:, :, None]).sum(1)
        return np.asarray(total_BD / np.maximum(mask.sum(1), 1)[:, None], np.float32)
