"""Runs a text through a network and quantizes each layer to 4 bits for the inputs that it gets.

Layer after layer: inputs are those that the layers before it give, quantized already.

Shapes: B windows · T tokens of a window · E hidden · I inputs of a linear layer
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.checkpoints.compressed_writer import compressed_grid, fitting_layers
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.models.decoder_layers import has_layer_state
from flambeau.llm.models.hugging_face import read_hugging_face
from flambeau.llm.models.tensor_names import part_name, part_rows
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.gptq import Grid, QuantizedRows, quantize_for_inputs
from flambeau.llm.quantize.int4 import scale_and_minimum
from flambeau.llm.quantize.settings import QuantizationSettings
from flambeau.llm.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

WINDOW = 512
MAX_WINDOWS = 64
WINDOWS_AT_ONCE = 4
MIN_TOKENS = 1024  # fewer say too little about the inputs of a layer


def calibrated_weights(folder: Path, text: str, form: str, group_size: int) -> dict[str, QuantizedRows]:
    """The 4-bit weights of a checkpoint for a format, by the names of tensors; experts are not among them."""
    ids = load_tokenizer(folder).encode(text)
    if len(ids) < MIN_TOKENS:
        raise InvalidRequest(
            f"the text to calibrate with has {len(ids)} tokens; use one of at least {MIN_TOKENS}", "text"
        )
    settings = QuantizationSettings(kind="int4", group_size=group_size)
    arch = read_hugging_face(folder)
    model = load_model(folder, device="cuda" if torch.cuda.is_available() else "cpu", dtype=torch.float32)
    if form == "flambeau":
        return calibrate_model(model, ids, settings, scale_and_minimum)
    settings = replace(settings, layers=fitting_layers(arch, settings))
    return calibrate_model(model, ids, settings, compressed_grid(arch))


@torch.inference_mode()
def calibrate_model(
    model: Transformer, ids: list[int], settings: QuantizationSettings, grid: Grid
) -> dict[str, QuantizedRows]:
    """Quantize the layers of a network; it computes with the quantized weights afterwards."""
    arch, indexer = model.arch, model.arch.indexer
    shares_choice = indexer is not None and bool(indexer.reusing_layers)
    if has_layer_state(arch) or arch.hyper is not None or arch.block_layers or shares_choice:
        raise InvalidRequest(
            "layers of this model read more than hidden states, so that they cannot be calibrated one by one; quantize "
            "it without a text",
            "text",
        )
    device = model.model.embed_tokens.weight.device
    window = min(WINDOW, model.arch.max_length, len(ids))
    ids_BT = torch.tensor(ids[: len(ids) // window * window], device=device).view(-1, window)[:MAX_WINDOWS]
    positions_T = torch.arange(window, device=device)
    states = [model.embed(part, positions_T.expand_as(part)) for part in torch.split(ids_BT, WINDOWS_AT_ONCE)]
    found: dict[str, QuantizedRows] = {}
    for number, layer in enumerate(model.model.layers):
        linears = {
            f"model.layers.{number}.{name}": module
            for name, module in layer.named_modules()
            if isinstance(module, nn.Linear) and settings.applies_to(f"model.layers.{number}.{name}", module)
        }
        with recorded_inputs(linears) as grams:
            run_layer(model, layer, states, positions_T)
        for name, linear in linears.items():
            group_size = settings.group_size_for(linear.in_features)
            rows = quantize_for_inputs(linear.weight, grams[name], group_size, grid)
            linear.weight = nn.Parameter(rows.dequantize().to(linear.weight.dtype), requires_grad=False)
            found |= by_tensor(model, f"{name}.weight", rows)
        states = run_layer(model, layer, states, positions_T)
        logger.info("layer %d of %d is calibrated", number + 1, len(model.model.layers))
    return found


def run_layer(model: Transformer, layer: nn.Module, states: list[Tensor], positions_T: Tensor) -> list[Tensor]:
    with model.rotation.for_length(len(positions_T)):
        rotations = [model.rotation(positions_T.expand(len(state), -1)) for state in states]
    return [layer(state, turn, WholeAttention()) for state, turn in zip(states, rotations, strict=True)]


@contextmanager
def recorded_inputs(linears: Mapping[str, nn.Linear]) -> Iterator[dict[str, Tensor]]:
    """The sums of products [I, I] of the inputs that layers get in this context."""
    grams: dict[str, Tensor] = {}

    def record(name: str, x: Tensor) -> None:
        flat = x.flatten(0, -2).float()
        gram = flat.t() @ flat
        grams[name] = grams[name] + gram if name in grams else gram

    hooks = [
        linear.register_forward_pre_hook(lambda _, inputs, name=name: record(name, inputs[0]))
        for name, linear in linears.items()
    ]
    try:
        yield grams
    finally:
        for hook in hooks:
            hook.remove()


def by_tensor(model: Transformer, name: str, rows: QuantizedRows) -> dict[str, QuantizedRows]:
    """Quantized weights by all names that their tensors may have: of the module, and of each part of it."""
    parts = part_rows(model.arch, name, len(rows.levels))
    return {name: rows, **{part_name(name, part): rows[place] for part, place in parts.items()}}
