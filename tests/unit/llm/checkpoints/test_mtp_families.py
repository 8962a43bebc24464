"""Layers of multi-token prediction, by their published names, give what those of transformers do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.mtp_weights import load_mtp, read_mtp
from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import LLMError
from flambeau.llm.models.draft_heads import DraftHead
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.speculation.adaptive_k import AdaptiveK
from support.checkpoints import VOCAB_SIZE, read_checkpoint, reference
from support.head_engines import head_engine, run_with_head

CPU = torch.device("cpu")
DEEPSEEK = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "mtp_block.": "", "post_norm": "shared_head.norm"}
QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "mtp_block": "layers.0"}
FAMILIES = {
    "deepseek-v3": ("model.layers.3.", DEEPSEEK, {"first_k_dense_replace": 0}),
    "deepseek-v3.2": ("model.layers.3.", DEEPSEEK, {"first_k_dense_replace": 0}),
    "deepseek-v3-halves": ("model.layers.3.", DEEPSEEK, {}),
    "glm-4.5": ("model.layers.3.", DEEPSEEK, {"first_k_dense_replace": 0}),
    "glm-4.7-flash": ("model.layers.3.", DEEPSEEK, {"mlp_layer_types": ["sparse"], "num_hidden_layers": 1}),
    "ernie-4.5-moe": (
        "model.",
        {"enorm": "mtp_emb_norm.0", "hnorm": "mtp_hidden_norm.0", "eh_proj": "mtp_linear_proj.0"}
        | {"mtp_block": "mtp_block.0"},
        {"moe_layer_start_index": 1},  # the layer is dense
    ),
    "qwen-3-next": ("mtp.", QWEN | {"post_norm": "norm"}, {"mlp_only_layers": []}),
    "qwen-3.5": ("mtp.", QWEN | {"post_norm": "norm"}, {}),
    "qwen-3.5-moe": ("mtp.", QWEN | {"post_norm": "norm"}, {}),
}


def layer_of(kind, model, changes):
    """A layer of transformers with random weights, for networks of one layer with attention."""
    from transformers.modeling_layers import MtpLayer

    decoder = model.get_decoder()
    one = {"num_hidden_layers": 1, **changes}
    if hasattr(decoder.config, "layer_types"):
        one["layer_types"] = ["full_attention"]
    small = reference(kind, seed=3, **one)
    template = small.get_decoder().layers[0]
    norm = type(decoder.norm)
    made = MtpLayer(small.config, lambda *_: template, norm, 0, use_post_norm=kind != "ernie-4.5-moe")
    generator = torch.Generator().manual_seed(4)
    for name, parameter in made.named_parameters():
        if not name.startswith("mtp_block."):
            size = parameter.shape
            parameter.data = torch.randn(size, generator=generator) * (0.3 if len(size) > 1 else 0.1)
    return made.eval().requires_grad_(False), small.get_decoder().rotary_emb


def write(folder: Path, kind: str):
    """A checkpoint with such a layer; the layer, its rotary positions, and the model as transformers has it."""
    prefix, names, changes = FAMILIES[kind]
    reference(kind).save_pretrained(folder)
    model = read_checkpoint(folder)
    layer, rotary = layer_of(kind, model, changes)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors = {}
    for name, value in layer.state_dict().items():
        for old, new in names.items():
            if name.startswith(old):
                tensors[prefix + new + name.removeprefix(old)] = value.clone()
                break
        else:
            raise AssertionError(name)
    whole = load_file(folder / "model.safetensors")
    assert not whole.keys() & tensors.keys()
    save_file(whole | tensors, folder / "model.safetensors")
    return layer, rotary, model


def expected_hidden(kind, layer, rotary, model, ids, hidden):
    from transformers.masking_utils import create_causal_mask

    embedded = model.get_input_embeddings()(ids)[None]
    positions = torch.arange(len(ids))[None]
    mask = create_causal_mask(
        config=layer.config,
        inputs_embeds=embedded,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
        allow_is_causal_skip=False,
    )
    states = model.get_decoder().norm(hidden)[None]
    found = layer(embedded, states, rotary(embedded, positions), mask, positions, None)[0]
    return model.get_decoder().norm(found) if kind == "ernie-4.5-moe" else found


def load_with_head(folder: Path) -> tuple[Transformer, DraftHead]:
    """The network of a folder, and its layer that predicts further tokens."""
    target = load_model(folder, device=CPU, dtype=torch.float32)
    settings, naming = read_mtp(folder, read_architecture(folder))
    return target, load_mtp(folder, settings, naming, target, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_layer_computes_what_that_of_transformers_does(kind, tmp_path):
    layer, rotary, model = write(tmp_path, kind)
    target, head = load_with_head(tmp_path)
    arch = target.arch
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB_SIZE, (23,), generator=generator)
    hidden = torch.randn(23, arch.hidden_size, generator=generator)
    with torch.inference_mode():
        wanted = expected_hidden(kind, layer, rotary, model, ids, hidden)
        found = head(ids, head.combine(hidden), torch.arange(23), WholeAttention())
        logits = model.lm_head(wanted)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(head.draft_logits(found), logits, atol=2e-3, rtol=1e-4)


LING = {"enorm": "{}", "hnorm": "{}", "eh_proj": "{}", "norm": "final_layernorm"}
# Networks of which transformers has no such layer. It is a copy of layers of their own: which ones, their new names,
# and those of what is around them.
COPIES = {
    "ling-3": ([1], "model.layers.3.", LING, {}),
    "hy-3": ([1], "model.layers.3.", LING, {}),
    "exaone-moe": (
        [0],
        "mtp.layers.0.",
        {name: f"mtp.{new}" for name, new in {**QWEN, "norm": "norm"}.items() if name != "mtp_block"},
        {"mtp_layer_types": ["sliding_attention"], "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "nemotron-h-moe": ([2, 3], "mtp.layers.{}.", {"norm": "mtp.layers.1.final_layernorm"}, {}),
}


def write_copies(folder: Path, kind: str):
    """A checkpoint with copies of layers, and their numbers."""
    layers, prefix, names, changes = COPIES[kind]
    kept = {key: value for key, value in changes.items() if not key.startswith("mtp")}
    reference(kind, **kept).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes | {"num_nextn_predict_layers": 1}))
    whole, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(4)
    size = config["hidden_size"]
    tensors = {
        name.replace(own, prefix.format(number)): value.clone()
        for number, layer in enumerate(layers)
        for name, value in whole.items()
        if (own := next((o for o in (f"model.layers.{layer}.", f"backbone.layers.{layer}.") if name.startswith(o)), ""))
    }
    assert len(tensors) > 8
    for name in ("enorm", "hnorm", "eh_proj", "norm"):
        shape = (size, 2 * size) if name == "eh_proj" else (size,)
        new = names.get(name, "{}").format(name)
        new = new if new.startswith("mtp.") else prefix.format(0) + new
        tensors[f"{new}.weight"] = torch.randn(shape, generator=generator) * 0.3 + float(len(shape) == 1)
    assert not whole.keys() & tensors.keys()
    save_file(whole | tensors, folder / "model.safetensors")
    return layers, {name.rpartition(".")[0].rpartition(".")[2]: value for name, value in tensors.items()}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_layers_computes_what_they_do(kind, tmp_path):
    layers, tensors = write_copies(tmp_path, kind)
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
    weights = {name: tensors.get(name, tensors.get(new)) for name, new in names.items()}
    target, head = load_with_head(tmp_path)
    arch = target.arch
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB_SIZE, (23,), generator=generator)
    hidden = torch.randn(23, arch.hidden_size, generator=generator)

    def norm(x, weight):
        return torch.nn.functional.rms_norm(x, (arch.hidden_size,), weight, arch.norm_epsilon)

    given = torch.randn(23, arch.hidden_size, generator=generator)
    both = norm(target.model.embed_tokens(ids), weights["enorm"]), norm(given, weights["hnorm"])
    x = torch.cat(both, dim=-1) @ weights["eh_proj"].T
    for layer in layers:
        x = target.model.layers[layer](x, target.rotation(torch.arange(23)), WholeAttention())
    wanted = norm(x, tensors.get("final_layernorm", tensors.get("norm")))
    found = head(ids, given, torch.arange(23), WholeAttention())
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(head.combine(hidden), target.model.norm(hidden))
    (expected, _), (texts, num_drafted) = (generate(tmp_path, each, compile=True) for each in (None, "mtp"))
    assert texts == expected
    assert num_drafted > 0


@pytest.mark.parametrize("compiles", [False, True], ids=["plain PyTorch", "kernels"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_texts_are_those_without_it(kind, compiles, tmp_path, monkeypatch):
    """Also where the other layers are recurrent, and this one attends."""
    check_texts(kind, tmp_path, monkeypatch, compile=compiles)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", ["deepseek-v3", "qwen-3.5-moe"])
def test_a_layer_in_bfloat16_reads_hidden_states_that_the_kernels_write_in_float32(
    kind, quantization, tmp_path, monkeypatch
):
    check_texts(kind, tmp_path, monkeypatch, dtype="bfloat16", quantization=quantization)


def generate(folder, speculation, **options):
    """Greedy texts, and how many tokens were proposed."""
    prompts = [[7, 8, 9, 10, 11] * 3, [5, 6, 7], [30, 20, 10, 4, 5, 2]]
    config = EngineConfig(device="cpu", num_blocks=60, block_size=4, max_num_seqs=4, speculate_k=3, **options)
    engine = head_engine(folder, replace(config, speculation=speculation))
    assert engine.info.speculation == speculation
    found = engine.generate(prompts, temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.close()
    return [each.token_ids for each in found], sum(each.counts.num_drafted for each in found)


def check_texts(kind, folder, monkeypatch, **options):
    """With proposals and without."""
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda self, _: max(self._numbers))
    write(folder, kind)
    (expected, _), (found, num_drafted) = (generate(folder, each, **options) for each in (None, "mtp"))
    assert found == expected
    assert num_drafted > 20


def write_several(folder: Path, kind: str, number: int):
    """A checkpoint with several layers; the model, and the layers as transformers runs them."""
    from transformers.modeling_layers import MtpModel

    reference(kind, num_mtp_layers=number).save_pretrained(folder)
    model = read_checkpoint(folder)
    layers = MtpModel(model, number).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for name, value in layers.layers.state_dict().items():
        size = value.shape
        value.copy_(torch.randn(size, generator=generator) * (0.3 if len(size) > 1 else 0.1) + float("norm" in name))
        depth, _, own = name.partition(".")
        own = own.replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
        tensors[f"model.layers.{3 + int(depth)}.{own}"] = value.clone()
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")
    return model, layers


@torch.inference_mode()
def proposed_by_several(model, layers, tokens: list[int]) -> list[int]:
    from transformers.cache_utils import MtpCache

    ids = torch.tensor([tokens])
    states = model.get_decoder()(ids[:, :-1]).last_hidden_state
    cache = MtpCache(config=model.config.get_mtp_config())
    found, _, _ = layers(ids[:, 1:], states, None, torch.arange(1, len(tokens))[None], cache)
    return found[0].tolist()


@pytest.mark.parametrize("options", [{}, {"num_blocks": 24}, {"max_step_tokens": 24}, {"speculate_k": 2}])
@pytest.mark.parametrize("kind", ["deepseek-v3", "glm-4.5"])
def test_several_layers_propose_one_token_each(kind, options, tmp_path, monkeypatch):
    """Those of transformers, after prompts, prefixes and rejected tokens; and texts are those without them."""
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda self, _: max(self._numbers))
    model, layers = write_several(tmp_path, kind, 3)
    config = EngineConfig(
        **{"device": "cpu", "compile": False, "num_blocks": 80, "block_size": 4, "max_num_seqs": 4, "speculate_k": 4}
        | options
    )
    found = run_with_head(tmp_path, config, speculation="mtp")
    assert (found.num_preempted > 0) == ("num_blocks" in options)
    assert max(len(ids) for _, ids in found.rounds) == min(3, config.speculate_k)
    wanted = {(*tokens,): proposed_by_several(model, layers, [*tokens]) for tokens, _ in found.rounds}
    assert [ids for _, ids in found.rounds] == [wanted[*tokens,][: len(ids)] for tokens, ids in found.rounds]


def test_layers_that_are_declared_and_not_published_are_refused(tmp_path):
    reference("minimax-m2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"use_mtp": True, "num_mtp_modules": 3}))
    with pytest.raises(LLMError, match=r"config.json has num_mtp_modules, but the weights .* are not among the files"):
        read_mtp(tmp_path, read_architecture(tmp_path))


def test_layers_with_other_names_are_refused(tmp_path):
    reference("nemotron-h-moe").save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    save_file(whole | {"mtp.blocks.0.eh_proj.weight": torch.zeros(32, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(LLMError, match=r"but others, such as mtp.blocks.0.eh_proj.weight; use a draft model"):
        read_mtp(tmp_path, read_architecture(tmp_path))
    recurrent = {f"mtp.layers.{name}": torch.zeros(32, 64) for name in ("0.eh_proj.weight", "1.mixer.A_log")}
    save_file(whole | recurrent, tmp_path / "model.safetensors")
    with pytest.raises(LLMError, match=r"has a recurrence, which is not supported; use a draft model"):
        read_mtp(tmp_path, read_architecture(tmp_path))
