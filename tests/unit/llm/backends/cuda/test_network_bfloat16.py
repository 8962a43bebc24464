"""Networks of every family in bfloat16: the kernels are about as near to float32 as plain PyTorch in bfloat16 is.

Errors are those of the logits of each row, relative to their norm. Their median is compared with that of plain PyTorch,
and none may be as large as with another expert: tokens are those for which experts are no matter of rounding. Weights
are the same numbers in both types.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch

from flambeau.llm.backends.cuda import comparison
from flambeau.llm.backends.cuda.parts import unknown_parts
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.models.moe import SparseMLP
from flambeau.llm.models.recurrent import RecurrentMixer
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.packed_layers import use_fast_layers
from flambeau.llm.quantize.quantizer import ExpertStack, quantize
from support.checkpoints import KINDS_OF_ALL, config_of
from support.llm_steps import BLOCK_SIZE
from support.steady_steps import steady_steps
from unit.llm.backends.cuda.test_network import UNKNOWN

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REPEATS = 9  # of steps of few rows, with other tokens
MAX_RATIO, SMALL_ERROR = 1.5, 0.002
LARGE_RATIO = 2.5  # of the medians of few rows
MAX_ROW_ERROR = 0.3  # in plain PyTorch up to 0.13
QUANTIZED_LENGTHS = (40, 9)  # of the prompts: with more rows, fp8 layers round their inputs, too
QUANTIZED = ["llama-3", "llama-biased", "qwen-3", "phi-2", "mixtral", "glm-4.5", "gpt-oss", "deepseek-v3", "minicpm-3"]
QUANTIZED += ["lfm-2", "mamba", "qwen-3.5", "granite-4-hybrid"]
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(DEVICE.type == "cpu", reason="Triton's interpreter does not know bfloat16"),
]


def random_network(arch):
    """One in bfloat16 whose norms and biases have an effect, too."""
    torch.manual_seed(0)
    model = Transformer(arch).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif weight.dim() == 1:
            torch.nn.init.normal_(weight, std=0.3)
        else:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    model = model.to(DEVICE, torch.bfloat16)
    for mixer in (module for module in model.modules() if isinstance(module, RecurrentMixer)):
        for parameter in mixer.parameters(recurse=False):
            parameter.data = parameter.data.float()  # decays
    return model


def widened(model):
    """The same network in float32, quantized layers as well."""
    wide = copy.deepcopy(model).float()
    for module in wide.modules():
        if isinstance(module, ExpertStack):
            module.dtype = torch.float32
    return wide


def errors(found, exact):
    """Of each row."""
    assert found.isfinite().all()
    return (found.float() - exact).norm(dim=1) / exact.norm(dim=1)


def lengths_of(arch, lengths=comparison.LENGTHS):
    return [min(length, arch.max_length - comparison.NUM_AFTER) for length in lengths]


def network_of(kind):
    return random_network(from_hugging_face(config_of(kind)))


@functools.cache
def steps_of(kind):
    """For tests that compare the same network with several."""
    model = network_of(kind)
    return steady_steps(model, lengths_of(model.arch), REPEATS)


class Networks:
    """A network in float32 and, in bfloat16, in plain PyTorch and by the kernels or what stands in for them."""

    def __init__(self, plain, build, lengths=comparison.LENGTHS, steps=None):
        self.arch = plain.arch
        lengths = lengths_of(self.arch, lengths)
        num_slots = 2 * len(lengths) if self.arch.recurrence else 0
        num_blocks = 1 + sum(comparison.blocks_of(length, BLOCK_SIZE) for length in lengths)
        caches = [
            KVCache(self.arch, num_blocks, BLOCK_SIZE, device=DEVICE, dtype=dtype, num_slots=num_slots)
            for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)
        ]
        self.exact, self.plain = EagerBackend(widened(plain), caches[0]), EagerBackend(plain, caches[1])
        self.ours = build(plain, caches[2])
        self.steps = steps or steady_steps(
            plain, lengths, REPEATS
        )  # those of few rows several times, with other tokens

    def logits(self, inputs):
        """Of all tokens: exact, plain and ours."""
        rows_T = torch.arange(len(inputs.ids_T))
        if not inputs.query_len:
            return [each.prefill(inputs, rows_T) for each in (self.exact, self.plain, self.ours)]
        inputs = inputs.to(DEVICE)
        return [self.exact.decode(inputs), self.plain.decode(inputs), self.ours.run(inputs)]

    def find_error(self):
        """Where the kernels are too far off; None: nowhere."""
        for name, many in self.steps:
            ours, plain = [], []
            for inputs in many:
                exact, of_plain, of_ours = self.logits(inputs)
                ours.append(errors(of_ours, exact))
                plain.append(errors(of_plain, exact))
            largest = float(torch.cat(ours).max())
            if largest > MAX_ROW_ERROR:
                return f"{name}: a row is {largest:.4f} off float32"
            found, allowed = (float(torch.cat(each).median()) for each in (ours, plain))
            ratio = MAX_RATIO if sum(map(len, ours)) > 40 else LARGE_RATIO
            if found > ratio * allowed + SMALL_ERROR:
                return f"{name}: {found:.4f} off float32, plain PyTorch {allowed:.4f}"
        return None


def kernels(model, cache):
    from flambeau.llm.backends.cuda.network import CudaNetwork

    fast = copy.deepcopy(model)
    use_fast_layers(fast, torch.bfloat16)  # the kernels know their layout
    return CudaNetwork(fast, cache)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs_gpu) for kind in KINDS_OF_ALL if kind not in UNKNOWN])
@torch.inference_mode()
def test_families(kind):
    arch = from_hugging_face(config_of(kind))
    assert not unknown_parts(arch)
    assert Networks(random_network(arch), kernels).find_error() is None


@pytest.mark.parametrize("weights", [pytest.param(each, marks=needs_gpu) for each in ("int8", "fp8", "int4")])
@pytest.mark.parametrize("kind", QUANTIZED)
@torch.inference_mode()
def test_quantized_families(kind, weights):
    """Exact are the quantized weights; how far they are from the original ones does not matter."""
    arch = replace(from_hugging_face(config_of(kind)), hidden_size=64, intermediate_size=128)
    arch = replace(arch, expert_size=64) if arch.num_experts else arch
    model = quantize(random_network(arch), weights, group_size=32)
    assert Networks(model, kernels, QUANTIZED_LENGTHS).find_error() is None


class StandIn:
    """Plain PyTorch whose logits of some steps are somewhat off."""

    def __init__(self, model, cache, noise, name):
        self._plain, self._noise, self._name = EagerBackend(model, cache), noise, name

    def _spoiled(self, logits, name):
        noise = self._noise if name == self._name else 0.0
        return logits + noise * logits.norm(dim=1, keepdim=True) * torch.randn_like(logits) / logits.shape[1] ** 0.5

    def prefill(self, inputs, rows_N):
        return self._spoiled(self._plain.prefill(inputs, rows_N), "prompts")

    def run(self, inputs):
        return self._spoiled(self._plain.decode(inputs), "steps")


@pytest.mark.parametrize("kind", ["llama-3", "deepseek-v3", "lfm-2"])
@pytest.mark.parametrize("name", ["prompts", "steps"])
@torch.inference_mode()
def test_errors_of_a_few_percent_are_found(kind, name):
    model = network_of(kind)
    for noise, is_found in ((0.0, False), (0.04, True)):
        error = Networks(model, lambda *given, n=noise: StandIn(*given, n, name), steps=steps_of(kind)).find_error()
        assert (error is not None) == is_found


@pytest.fixture
def choices(monkeypatch):
    """The experts of each token, layer after layer, that plain PyTorch chooses."""
    found, choose = [], SparseMLP.choose

    def recorded(mlp, x_TE):
        weights_TA, chosen_TA = choose(mlp, x_TE)
        found.append(chosen_TA.sort(dim=-1)[0].tolist())
        return weights_TA, chosen_TA

    monkeypatch.setattr(SparseMLP, "choose", recorded)
    return found


SPARSE = ["granite-moe-swa", "deepseek-v3", "jamba", "qwen-3-next"]


@pytest.mark.parametrize("kind", SPARSE)
@torch.inference_mode()
def test_experts_are_no_matter_of_rounding(kind, choices):
    networks = Networks(network_of(kind), EagerBackend, steps=steps_of(kind))
    by_type, logits = [], []
    for network in (networks.exact, networks.plain):
        choices.clear()
        found = [network.prefill(each, torch.arange(len(each.ids_T))) for _, many in networks.steps for each in many]
        by_type.append([*choices])
        logits.append(torch.cat(found))
    assert by_type[0] == by_type[1]
    assert len({tuple(chosen) for rows in choices for chosen in rows}) > 2  # and not the same ones for all tokens
    assert float(errors(logits[1], logits[0]).max()) < MAX_ROW_ERROR / 2


@pytest.mark.parametrize("kind", SPARSE)
@torch.inference_mode()
def test_other_experts_are_found(kind):
    """Those of a router that takes one expert for another."""
    wrong = network_of(kind)
    for mlp in (module for module in wrong.modules() if isinstance(module, SparseMLP)):
        mlp.gate.weight.copy_(mlp.gate.weight[[1, 0, *range(2, len(mlp.gate.weight))]])
    networks = Networks(network_of(kind), lambda _, cache: StandIn(wrong, cache, 0.0, ""), steps=steps_of(kind))
    assert networks.find_error() is not None
