"""Heads in files: EAGLE folders as they are published, and layers of multi-token prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import flambeau.examples
from flambeau.llm.checkpoints.eagle_weights import eagle_layers, is_eagle, read_eagle
from flambeau.llm.config import EngineConfig
from flambeau.llm.engine import Engine
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.executor.head import HeadModel
from flambeau.llm.loader import load_engine
from flambeau.llm.models.draft_heads import HeadSettings
from flambeau.llm.models.head_kinds import make_head
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.network_loader import load_network
from flambeau.llm.proposers import check_head
from flambeau.llm.speculation.adaptive_k import AdaptiveK
from support.tiny_heads import published_eagle, published_mtp, tiny_head
from support.tiny_models import tiny_model

CPU = torch.device("cpu")
STORYTELLER = Path(flambeau.examples.__file__).parent / "storyteller"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
HEAD = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 24}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 1.5,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
DEEPSEEK = LLAMA | EXPERTS | LATENT | {"architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4}
MTP = {
    "DeepseekV3": {key: value for key, value in DEEPSEEK.items() if key != "head_dim"},
    "Glm4Moe": LLAMA | EXPERTS | {"architectures": ["Glm4MoeForCausalLM"], "partial_rotary_factor": 0.5},
    "MiMo": LLAMA | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
}


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Whether it pays is another matter."""
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda self, _: max(self._numbers))


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.clone().contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def target(model, tmp_path_factory):
    return write(tmp_path_factory.mktemp("target"), LLAMA, model.state_dict())


def load(target, **options):
    config = EngineConfig(**{"device": "cpu", "compile": False, "num_blocks": 60, "block_size": 4, **options})
    loaded = load_network(target, config, CPU, None)
    engine = Engine(loaded.arch, loaded.backend, num_blocks=loaded.num_blocks, config=config, draft=loaded.draft)
    return engine, loaded.draft


def check_texts(engine, target):
    """The greedy texts are those without a head, and tokens were proposed."""
    prompts = [[5, 6, 7, 8, 9, 10, 11], [40, 41, 42], [90, 3, 12, 60, 61]]
    options = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    expected = load(target)[0].generate(prompts, **options)
    found = engine.generate(prompts, **options)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert sum(each.counts.num_drafted for each in found) > 0


@pytest.mark.parametrize("form", ["published", "with a prefix", "speculators", "own embeddings", "EAGLE 3.1"])
def test_an_eagle_3_head_is_recognized_and_loaded(form, target, model, tmp_path):
    forms = {"own embeddings": {"has_embeddings": True}, "EAGLE 3.1": {"norms_each": True, "norms_output": True}}
    more = forms.get(form, {})
    head = tiny_head("eagle3", model, draft_vocab_size=24, norm_before_residual=form == "speculators", **more)
    tensors, config = published_eagle(head), HEAD
    if form == "with a prefix":  # and the configuration of a Llama, as the first heads have it
        tensors = {f"model.{name}".replace("midlayer", "layers.0"): value for name, value in tensors.items()}
        config = {key: value for key, value in HEAD.items() if key != "draft_vocab_size"} | LLAMA
        config["num_hidden_layers"] = 1
    if form == "EAGLE 3.1":
        config = HEAD | {"fc_norm": True, "norm_output": True}
    if form == "speculators":
        layer = {key: value for key, value in LLAMA.items() if key != "architectures"} | {"num_hidden_layers": 1}
        config = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 24}
        config |= {"transformer_layer_config": layer, "norm_before_residual": True}
    folder = write(tmp_path / "head", config, tensors)
    assert is_eagle(folder)
    engine, draft = load(target, draft=str(folder))
    assert isinstance(draft, HeadModel)
    assert engine.info.speculation == "eagle3"
    assert engine.draft_model is None
    assert draft.head.settings == replace(head.settings, arch=draft.head.arch)
    state = draft.head.state_dict()
    assert state.keys() == head.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in head.state_dict().items())
    assert torch.equal(draft.head.target_ids_D, head.target_ids_D)
    check_texts(engine, target)


def test_an_eagle_head_is_loaded(target, model, tmp_path):
    head = tiny_head("eagle", model, has_bias=True)
    config = LLAMA | {"num_hidden_layers": 1}
    engine, draft = load(target, draft=str(write(tmp_path / "head", config, published_eagle(head))))
    assert engine.info.speculation == "eagle"
    assert draft.head.settings.layers == (3,)
    check_texts(engine, target)


def test_a_model_is_no_head(target):
    assert not is_eagle(target)
    assert not is_eagle(STORYTELLER / "draft")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 31]}, (2, 18, 31)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (2, 16, 29)),  # outputs of layers
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 16, 29)),
    ],
)
def test_the_layers_that_a_head_reads(config, expected):
    assert eagle_layers(config, 32) == expected
    with pytest.raises(LLMError, match=r"reads the layers 2, 1, -1, and the model has 2; use the head"):
        eagle_layers({}, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 99}, "has 99 tokens and the model 97; use the head that was trained"),
        ({"hidden_size": 96, "head_dim": 24}, "has hidden states of 96 numbers and the model of 48"),
        ({"use_moe": True}, "use_moe of the EAGLE head .* is not supported"),
        ({"architectures": ["PEagleDraftModel"]}, "is P-EAGLE, which proposes all tokens at once.*use an EAGLE head"),
        ({"speculators_model_type": "mlp_speculator"}, "is an MLP speculator, which is not supported"),
        ({"medusa_num_heads": 5}, "is Medusa, which is not supported"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, "reads 144 numbers of a token, and 2 hidden states"),
    ],
)
def test_the_head_of_another_model_is_refused(change, message, target, model, tmp_path):
    tensors = published_eagle(tiny_head("eagle3", model, draft_vocab_size=24))
    folder = write(tmp_path / "head", HEAD | change, tensors)
    with pytest.raises(LLMError, match=message):
        load(target, draft=str(folder))


def test_a_head_without_embeddings_needs_those_of_the_model_to_have_its_size(model, tmp_path):
    """OPT-350M's are narrower, and are projected to the hidden size."""
    folder = write(tmp_path / "head", HEAD, published_eagle(tiny_head("eagle3", model, draft_vocab_size=24)))
    with pytest.raises(LLMError, match="needs embeddings of 48 numbers, and the model's have 20; use a draft model"):
        read_eagle(folder, replace(model.arch, embedding_size=20))


def test_broken_heads_are_refused(target, model, tmp_path):
    tensors = published_eagle(tiny_head("eagle3", model, draft_vocab_size=24))
    broken = {
        "but no tensor d2t": {name: value for name, value in tensors.items() if name != "d2t"},
        "does not name 24 tokens": tensors | {"d2t": tensors["d2t"] + 1000},
        "missing: model.norm.weight": {name: value for name, value in tensors.items() if name != "norm.weight"},
        "not known: midlayer.self_attn.q_norm.weight": tensors | {"midlayer.self_attn.q_norm.weight": torch.ones(12)},
        "has experts, which is not supported": tensors | {"midlayer.mlp.experts.0.up_proj.weight": torch.ones(2)},
        "has latent attention": tensors | {"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(2)},
        "no tensor fc.weight": {name: value for name, value in tensors.items() if name != "fc.weight"},
    }
    for message, given in broken.items():
        with pytest.raises(CheckpointError, match=message):
            load(target, draft=str(write(tmp_path / "head", HEAD, given)))


def test_what_a_head_does_not_work_with_is_refused(target, model, tmp_path):
    folder = write(tmp_path / "head", HEAD, published_eagle(tiny_head("eagle3", model, draft_vocab_size=24)))
    with pytest.raises(LLMError, match="leave one of them out"):
        load(target, draft=str(folder), speculation="mtp")
    with pytest.raises(LLMError, match=r"this model runs through transformers; use a draft model"):
        load_engine(STORYTELLER / "target", draft=str(folder), model_impl="transformers", device="cpu")
    with pytest.raises(
        LLMError, match=r"needs a layer of multi-token prediction, and .* has none.*--speculative lookup"
    ):
        load(target, speculation="mtp")


def test_several_streams_are_refused_before_anything_is_read(target, model, tmp_path):
    """A head would read one of them; see Gemma 3n."""
    folder = write(tmp_path / "head", HEAD, published_eagle(tiny_head("eagle3", model, draft_vocab_size=24)))
    arch = replace(model.arch, num_streams=4)
    for config in (EngineConfig(draft=str(folder)), EngineConfig(speculation="mtp")):
        with pytest.raises(
            LLMError, match=r"this model has 4 streams of them; use a draft model.*--speculative lookup"
        ):
            check_head(config, arch)
    for config in (EngineConfig(), EngineConfig(draft=str(target)), EngineConfig(draft=str(folder), speculate_k=0)):
        check_head(config, arch)


def mtp_checkpoint(folder, config):
    """A model with a layer of multi-token prediction; with that layer's tensors by our own names."""
    arch = from_hugging_face(config)
    model = tiny_model(arch)
    layer = replace(arch, num_layers=1, dense_layers=frozenset())
    settings = HeadSettings(kind="mtp", arch=layer, layers=(arch.num_layers,), state_size=arch.hidden_size)
    head = make_head(settings)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.15)
    tensors = published_mtp(head, "MiMo" if "MiMo" in config["architectures"][0] else "DeepSeek", arch)
    return write(folder, config, model.state_dict() | tensors), head.state_dict()


@pytest.mark.parametrize("family", MTP)
def test_a_layer_of_multi_token_prediction_is_used_if_asked(family, tmp_path, caplog):
    folder, expected = mtp_checkpoint(tmp_path / "model", MTP[family])
    engine, draft = load(folder, speculation="mtp")
    assert engine.info.speculation == "mtp"
    state = draft.head.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert draft.head.settings.hidden_first == (family == "MiMo")
    assert draft.head.arch.has_experts(0) == (family != "MiMo")
    caplog.set_level("INFO")
    caplog.clear()
    check_texts(engine, folder)
    assert "has a layer of multi-token prediction, which is not loaded; speculative: mtp uses it" in caplog.text


def test_a_quantized_layer_of_multi_token_prediction(tmp_path):
    folder, _ = mtp_checkpoint(tmp_path / "model", MTP["MiMo"])
    engine, draft = load(folder, speculation="mtp", quantization="int8")
    assert "Int8" in type(draft.head.eh_proj).__name__
    assert engine.generate([[1, 2, 3]], temperature=0.0, max_tokens=9, ignore_eos=True)[0].counts.num_drafted > 0


@pytest.mark.parametrize("plain", ["nothing", ".mtp_layers.", ".input_proj."])
def test_a_layer_of_multi_token_prediction_in_a_packed_checkpoint(plain, tmp_path):
    """The weights of all layers are fp8; those of this one, or only its projection, may be left as they were."""
    folder, expected = mtp_checkpoint(tmp_path / "model", MTP["MiMo"])
    packed = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight") or plain in name:
            packed[name] = value
            continue
        scale = value.abs().max() / 448
        packed |= {name: (value / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    write(folder, MTP["MiMo"] | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, packed)
    engine, draft = load(folder, speculation="mtp")
    found = draft.head.eh_proj.weight
    assert torch.allclose(found, expected["eh_proj.weight"], atol=0.05 if plain == "nothing" else 0.0)
    assert ("Fp8" in type(draft.head.model.layers[0].self_attn.o_proj).__name__) == (plain != ".mtp_layers.")
    check_texts(engine, folder)


def test_the_blocks_of_a_head_are_stored_with_the_models(target, model, tmp_path):
    """Another engine finds its prefixes on disk, with the entries of the head; another head has others."""
    prompt, options = [*range(3, 33)], {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    texts, restored = [], []
    for seed in (5, 5, 6):
        head = tiny_head("eagle3", model, draft_vocab_size=24, seed=seed)
        folder = write(tmp_path / f"head-{seed}", HEAD, published_eagle(head))
        config = EngineConfig(
            device="cpu",
            compile=False,
            num_blocks=60,
            block_size=4,
            draft=str(folder),
            kv_disk_folder=str(tmp_path / "kv"),
        )
        loaded = load_network(target, config, CPU, None)
        engine = Engine(
            loaded.arch,
            loaded.backend,
            num_blocks=loaded.num_blocks,
            config=config,
            draft=loaded.draft,
            store=loaded.store,
        )
        texts.append(engine.generate([prompt], **options)[0].token_ids)
        restored.append(engine.state.num_blocks_restored)
        engine.close()
    assert texts[0] == texts[1] == texts[2]
    assert restored[0] == restored[2] == 0
    assert restored[1] > 0
