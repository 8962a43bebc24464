"""A GGUF file gives the network that transformers has for the same weights."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.errors import CheckpointError
from flambeau.llm.loader import load_engine
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.sampling_params import SamplingParams
from support.checkpoints import reference
from support.gguf_files import by_pairs, pieces_of, write_gguf
from support.language_models import HEADS, KV_HEADS, write_language_model
from support.tokenizer_files import sentencepiece_bytes

IDS = torch.tensor([[3, 1, 4, 15, 9, 26, 53, 58, 9, 7, 93, 12, 77]])
LLAMA = ("llama", "granite", "smollm3")
GEMMA = ("gemma", "gemma2", "gemma3")


def values_of(config, **more):
    """The header's values of a model of transformers."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    values = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "context_length": config.max_position_embeddings,
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    if getattr(config, "head_dim", None):
        values["attention.key_length"] = values["attention.value_length"] = config.head_dim
    return {**values, **more}


def tensors_of(model, architecture):
    """The weights as a GGUF file has them: pairs of rotated rows for Llama, sums for Gemma's norms, stacked experts."""
    config, tensors = model.config, dict(model.state_dict())
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for name, tensor in tensors.items():
        if architecture in LLAMA and ".q_proj." in name:
            tensors[name] = by_pairs(tensor, config.num_attention_heads)
        elif architecture in LLAMA and ".k_proj." in name:
            tensors[name] = by_pairs(tensor, config.num_key_value_heads)
        elif architecture in GEMMA and "norm" in name:
            tensors[name] = tensor + 1
    return {part: value for name, tensor in tensors.items() for part, value in apart(name, tensor).items()}


def apart(name, tensor):
    """Gates and the rest of stacked experts, by the names that the package knows."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    start = name.rpartition(".")[0]
    if name.endswith("down_proj"):
        return {f"{start}.down_proj.weight": tensor}
    gate, up = tensor.chunk(2, dim=1)
    return {f"{start}.gate_proj.weight": gate, f"{start}.up_proj.weight": up}


def logits_of(model):
    with torch.inference_mode():
        return model.logits(model(IDS[0], torch.arange(IDS.shape[1]), WholeAttention()))


def check(path, model, **options):
    found = load_model(path, dtype=torch.float32, **options)
    with torch.inference_mode():
        torch.testing.assert_close(logits_of(found), model(IDS).logits[0], rtol=1e-4, atol=1e-4)
    return found


EXPERTS = {"expert_count": 4, "expert_used_count": 2}
SCALES = {"embedding_scale": 6.0, "residual_scale": 0.5, "attention.scale": 0.1, "logit_scale": 4.0}
KINDS = [
    ("llama-2", "llama", {}),
    ("llama-biased", "llama", {}),
    ("llama-linear", "llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    ("smol-lm", "llama", {}),
    ("mixtral", "llama", EXPERTS),
    ("qwen-2", "qwen2", {}),
    (
        "qwen-2.5-yarn",
        "qwen2",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    ),
    ("qwen-3", "qwen3", {}),
    (
        "qwen-3-moe-normalized",
        "qwen3moe",
        {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 24},
    ),
    (
        "qwen-2-moe",
        "qwen2moe",
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 24,
            "expert_shared_feed_forward_length": 40,
        },
    ),
    ("gemma", "gemma", {}),
    (
        "gemma-2",
        "gemma2",
        {"attention.sliding_window": 9, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    ("gemma-3", "gemma3", {"attention.sliding_window": 9}),
    ("phi-3", "phi3", {"attention.sliding_window": 9}),
    ("granite", "granite", SCALES),
    ("smol-lm-3", "smollm3", {}),
    ("olmo-2", "olmo2", {}),
]
OPTIONS = {  # of the network, where GGUF files cannot say otherwise
    "mixtral": {"sliding_window": None},
    "qwen-2-moe": {"mlp_only_layers": [], "num_hidden_layers": 2},
    "gemma-2": {"query_pre_attn_scalar": 16},
    "gemma-3": {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "layer_types": None},
    "smol-lm-3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
}


@pytest.mark.parametrize(("kind", "architecture", "values"), KINDS, ids=[kind for kind, *_ in KINDS])
def test_network_is_that_of_transformers(tmp_path, kind, architecture, values):
    model = reference(kind, **OPTIONS.get(kind, {}))
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, tensors_of(model, architecture), values_of(model.config, **values))
    check(path, model)
    assert read_architecture(path).unknown_keys == ()


def test_frequencies_of_llama_3_are_in_the_file(tmp_path):
    model = reference("llama-3.1")
    plain = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    factors = plain / model.model.rotary_emb.inv_freq
    tensors = {**tensors_of(model, "llama"), "rope_freqs.weight": factors}
    write_gguf(tmp_path / "model.gguf", "llama", tensors, values_of(model.config))
    check(tmp_path, model)


def test_factors_of_longrope_are_in_the_file(tmp_path):
    model = reference("phi-3-long")
    given = model.config.rope_parameters
    tensors = tensors_of(model, "phi3") | {
        f"rope_factors_{name}.weight": torch.tensor(given[f"{name}_factor"]) for name in ("long", "short")
    }
    more = {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 16}
    more |= {"attention.sliding_window": 0}  # as converters write that there is none
    factor = model.model.rotary_emb.attention_scaling
    write_gguf(
        tmp_path / "model.gguf",
        "phi3",
        tensors,
        values_of(model.config, **more, **{"rope.scaling.attn_factor": factor}),
    )
    assert read_architecture(tmp_path).rope_scaling.long_factors == pytest.approx(given["long_factor"])
    assert read_architecture(tmp_path).rope_scaling.attention_factor == pytest.approx(factor)
    assert read_architecture(tmp_path).switch_length == 16


TYPES = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_of_all_types_are_read(tmp_path, kind):
    model = reference("llama-2", hidden_size=256, intermediate_size=256)
    tensors = tensors_of(model, "llama")
    written = write_gguf(tmp_path / "model.gguf", "llama", tensors, values_of(model.config), kind)
    write_gguf(tmp_path / "plain" / "model.gguf", "llama", written, values_of(model.config))
    found, expected = (load_model(folder, dtype=torch.float32) for folder in (tmp_path, tmp_path / "plain"))
    torch.testing.assert_close(logits_of(found), logits_of(expected), rtol=1e-4, atol=1e-4)
    is_own = kind in ("Q4_0", "Q4_1", "Q4_K")
    assert isinstance(found.model.layers[0].self_attn.qkv_proj, Int4Linear if is_own else torch.nn.Linear)
    if is_own:  # exactly
        own = found.model.layers[1].self_attn.qkv_proj.dequantize(torch.float32)
        assert torch.equal(own, expected.model.layers[1].self_attn.qkv_proj.weight)


def test_mixed_types_keep_whole_modules(tmp_path, caplog):
    model = reference("llama-2", hidden_size=256, intermediate_size=256)
    kinds = {"v_proj": "Q6_K", "embed_tokens": "Q6_K"}
    write_gguf(
        tmp_path / "model.gguf",
        "llama",
        tensors_of(model, "llama"),
        values_of(model.config),
        lambda name: next((kind for part, kind in kinds.items() if part in name), "Q4_K"),
    )
    with caplog.at_level(logging.WARNING):
        found = load_model(tmp_path, dtype=torch.float32)
    assert isinstance(found.model.layers[0].mlp.down_proj, Int4Linear)
    assert isinstance(found.model.layers[0].self_attn.qkv_proj, torch.nn.Linear)
    assert "9 layers stay int4 in groups of 32, 6 layers are dequantized" in caplog.text


def test_experts_are_dequantized_and_the_log_says_so(tmp_path, caplog):
    model = reference("mixtral", sliding_window=None, hidden_size=32, intermediate_size=64)
    tensors = tensors_of(model, "llama")
    values = values_of(model.config, **EXPERTS)
    written = write_gguf(tmp_path / "packed" / "model.gguf", "llama", tensors, values, "Q4_0")
    write_gguf(tmp_path / "plain" / "model.gguf", "llama", written, values)
    with caplog.at_level(logging.WARNING):
        found, expected = (load_model(tmp_path / name, dtype=torch.float32) for name in ("packed", "plain"))
    torch.testing.assert_close(logits_of(found), logits_of(expected), rtol=1e-4, atol=1e-4)
    assert "6 stacks of experts are dequantized too" in caplog.text


def test_parts_of_a_model_belong_together(tmp_path):
    model = reference("llama-biased")
    tensors = tensors_of(model, "llama")
    names = list(tensors)
    for i, part in enumerate((names[::2], names[1::2]), 1):
        path = tmp_path / f"model-{i:05d}-of-00002.gguf"
        chosen = {name: tensors[name] for name in part} | ({} if i > 1 else {names[0]: tensors[names[0]]})
        write_gguf(path, "llama", chosen, values_of(model.config))
    check(tmp_path, model)
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"missing: model-00002-of-00002\.gguf"):
        load_model(tmp_path)


@pytest.fixture
def path(tmp_path):
    model = reference("llama-2")
    write_gguf(tmp_path / "model.gguf", "llama", tensors_of(model, "llama"), values_of(model.config))
    return tmp_path / "model.gguf"


def test_a_damaged_file_is_refused(path):
    content = path.read_bytes()
    for size in (2, 10, 300, 900, len(content) - 500):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match="cut off or damaged"):
            load_model(path)
    path.write_bytes(b"GGML" + content[4:])
    with pytest.raises(CheckpointError, match="does not begin with GGUF"):
        load_model(path)
    path.write_bytes(content[:4] + (1).to_bytes(4, "little") + content[8:])
    with pytest.raises(CheckpointError, match="version 1"):
        load_model(path)


def test_two_models_in_a_folder_need_a_name(path):
    (path.parent / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=r"model\.gguf, other\.gguf; name one"):
        load_model(path.parent)
    load_model(path)


@pytest.mark.parametrize(
    ("architecture", "values", "named"),
    [
        ("rwkv7", {}, "'rwkv7'.*Hugging Face folder. Supported are llama, llama4"),
        ("clip", {}, "'clip'.*name that model's file"),
        ("llama", {"attention.causal": False}, r"llama\.attention\.causal.*Hugging Face folder"),
        ("mamba", {}, r"mamba\.ssm\.inner_size"),
        ("llama", {"attention.sliding_window": 9}, "sliding_window"),
        ("llama", {"attention.head_count_kv": [2, 4]}, "differs between layers"),
        ("llama", {"rope.dimension_count": 4}, "rope.dimension_count 4"),
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.attn_factor": 2.0}, "attn_factor"),
        ("llama", {"rope.scaling.type": "spiral"}, "'spiral'"),
        ("llama", {"rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 0.5}, "yarn_attn_factor 0.5"),
        ("llama", {"rope.twist": 3}, "rope.twist 3"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, architecture, values, named):
    model = reference("llama-2")
    write_gguf(tmp_path / "model.gguf", architecture, tensors_of(model, "llama"), values_of(model.config) | values)
    with pytest.raises(CheckpointError, match=named):
        load_model(tmp_path)


def test_unknown_keys_are_named(tmp_path, caplog):
    model = reference("llama-2")
    write_gguf(tmp_path / "a.gguf", "llama", tensors_of(model, "llama"), values_of(model.config, twist=3))
    with caplog.at_level(logging.WARNING):
        load_model(tmp_path)
    assert "llama.twist" in caplog.text


def test_the_file_alone_is_enough_for_an_engine(tmp_path):
    folder = write_language_model(tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    for part, heads in {".q_proj.": HEADS, ".k_proj.": KV_HEADS}.items():
        tensors |= {name: by_pairs(tensor, heads) for name, tensor in tensors.items() if part in name}
    config = SimpleNamespace(**json.loads((folder / "config.json").read_text()), rope_parameters={"rope_theta": 1e4})
    special = {"bos_token_id": 1, "eos_token_id": 2}
    pieces = {**pieces_of(sentencepiece_bytes()), **special, "model": "llama"}
    tokenizer = {f"ggml.{key}": value for key, value in pieces.items()}
    path = tmp_path / "alone" / "small.gguf"
    write_gguf(path, "llama", tensors, values_of(config), tokenizer=tokenizer)
    options = {"compile": False, "num_blocks": 40}
    texts = []
    for checkpoint in (folder, path):
        engine = load_engine(checkpoint, **options)
        texts.append(
            [output.text for output in engine.generate(["To be, or"], SamplingParams(max_tokens=12, temperature=0))]
        )
        engine.close()
    assert texts[0] == texts[1]
