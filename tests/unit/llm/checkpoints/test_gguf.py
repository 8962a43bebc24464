"""A GGUF file gives the network that transformers has for the same weights."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from flambeau.llm.backends.cpu.bindings import kernels
from flambeau.llm.backends.cpu.packed_linear import PackedLinear
from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.gguf_tensors import read_tensor
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.config import EngineConfig
from flambeau.llm.cpu_weights import can_keep_groups, packer
from flambeau.llm.errors import CheckpointError
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.gguf_header import read_header
from flambeau.llm.loader import load_engine
from flambeau.llm.models.embeddings import RowEmbedding
from flambeau.llm.network_loader import load_network
from flambeau.llm.quantize.groups import GroupedLinear, JoinedLinear
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.quantizer import ExpertStack
from flambeau.llm.sampling_params import SamplingParams
from support.adapters import write_adapter
from support.checkpoints import reference
from support.cpu_kernels import need_cpu_kernels
from support.gguf_files import by_pairs, pieces_of, tensors_of, values_of, write_gguf, written_twice
from support.language_models import HEADS, KV_HEADS, write_language_model
from support.tokenizer_files import sentencepiece_bytes

IDS = torch.tensor([[3, 1, 4, 15, 9, 26, 53, 58, 9, 7, 93, 12, 77]])


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


FLOAT_TYPES = ("F16", "BF16")
PAIR_TYPES = ("Q4_0", "Q4_1", "Q4_K", "TQ1_0", "TQ2_0")
TYPES = [*FLOAT_TYPES, *PAIR_TYPES, "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]


@pytest.mark.parametrize("groups", [None, "cpu"])
@pytest.mark.parametrize("kind", TYPES)
def test_numbers_of_all_types_are_read(tmp_path, kind, groups):
    model = reference("llama-2", hidden_size=256, intermediate_size=256)
    paths = written_twice(tmp_path, model, "llama", values_of(model.config), kind)
    found, expected = (load_model(path, dtype=torch.float32, forms=KeptForms(groups=groups)) for path in paths)
    torch.testing.assert_close(logits_of(found), logits_of(expected), rtol=1e-4, atol=1e-4)
    other = GroupedLinear if groups and kind not in FLOAT_TYPES else torch.nn.Linear
    layer, plain = (each.model.layers[1].self_attn.qkv_proj for each in (found, expected))
    assert isinstance(layer, Int4Linear if kind in PAIR_TYPES else other)
    if not isinstance(layer, torch.nn.Linear):
        assert torch.equal(layer.dequantize(torch.float32), plain.weight)  # exactly
    assert torch.equal(found.model.embed_tokens.weight, expected.model.embed_tokens.weight)
    assert isinstance(found.model.embed_tokens, RowEmbedding) == (groups is not None and kind not in FLOAT_TYPES)


def test_types_without_a_form_of_their_own_are_dequantized(tmp_path):
    """Also factors of whole tensors, which files with NVFP4 have beside them."""
    kinds = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "NVFP4"]
    model = reference("llama-2", hidden_size=256, intermediate_size=256)
    tensors = tensors_of(model, "llama")
    matrices = [name for name in tensors if name.endswith("_proj.weight")]
    factors = {name.replace(".weight", ".scale"): torch.tensor([0.5 + i / 20]) for i, name in enumerate(matrices)}
    factors = {f"blk.{name.split('.')[2]}.{NAMES[name.split('.')[4]]}.scale": one for name, one in factors.items()}
    inputs = {name.replace(".scale", ".input_scale"): torch.ones(1) for name in factors}
    packed, plain = tmp_path / "packed" / "model.gguf", tmp_path / "plain" / "model.gguf"
    values = values_of(model.config)
    chosen = {name: kinds[i % len(kinds)] for i, name in enumerate(matrices)}
    stored = write_gguf(packed, "llama", tensors | factors | inputs, values, lambda name: chosen.get(name, "F32"))
    scaled = {name: stored[name] * factor for name, factor in zip(matrices, factors.values(), strict=True)}
    write_gguf(plain, "llama", {name: scaled.get(name, stored[name]) for name in tensors}, values)
    found, expected = (load_model(path, dtype=torch.float32, forms=KeptForms(groups="cpu")) for path in (packed, plain))
    torch.testing.assert_close(logits_of(found), logits_of(expected), rtol=1e-4, atol=1e-4)
    assert isinstance(found.model.layers[0].mlp.down_proj, torch.nn.Linear)


def test_types_that_the_package_cannot_widen_are_refused_by_name(tmp_path):
    model = reference("llama-2", hidden_size=128, intermediate_size=128)
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", tensors_of(model, "llama"), values_of(model.config), "Q8_0")
    header = read_header(path).tensors
    name = "blk.0.attn_v.weight"
    for kind, message in (
        (41, rf"{name} in .* has the type Q1_0, which is not supported"),
        (36, "type 36, which is not"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_tensor(path, replace(header[name], kind=kind))


NAMES = {
    **{f"{part}_proj": f"attn_{part}" for part in "qkv"},
    "o_proj": "attn_output",
    **{f"{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def mixed(name):
    """The types of a file that is called Q4_K_M, and floats, in one module."""
    kinds = {"v_proj": "Q6_K", "k_proj": "F16", "down_proj": "Q6_K", "embed_tokens": "Q6_K", "1.mlp.up": "Q8_0"}
    return next((kind for part, kind in kinds.items() if part in name), "Q4_K")


@pytest.fixture(scope="module")
def biased():
    """Queries, keys and values have biases; the embeddings are tied."""
    return reference("qwen-2", hidden_size=256, intermediate_size=256, tie_word_embeddings=True)


def test_projections_of_several_types_stay_as_they_are(tmp_path, biased, caplog):
    paths = written_twice(tmp_path, biased, "qwen2", values_of(biased.config), mixed)
    with caplog.at_level(logging.INFO):
        found, expected = (load_model(path, dtype=torch.float32, forms=KeptForms(groups="cpu")) for path in paths)
    torch.testing.assert_close(logits_of(found), logits_of(expected), rtol=1e-4, atol=1e-4)
    first, second = found.model.layers[:2]
    assert [type(part) for part in first.self_attn.qkv_proj.parts] == [Int4Linear, torch.nn.Linear, GroupedLinear]
    assert isinstance(first.mlp.gate_up_proj, Int4Linear)
    assert [type(part) for part in second.mlp.gate_up_proj.parts] == [Int4Linear, GroupedLinear]
    assert "7 tensors stay int4, 5 tensors stay int6, 1 tensor stays int8" in caplog.text
    assert "dequantized" not in caplog.text


def loaded_on_cpu(path, **options):
    """What the loader makes of a file on a CPU, without a tokenizer."""
    config = EngineConfig(device="cpu", num_blocks=8, **options)
    loaded = load_network(path, config, torch.device("cpu"), None)
    loaded.backend.wait_until_compiled()
    return loaded


def network_of(path, **options):
    return loaded_on_cpu(path, **options).backend


def prefill(backend, adapter=None):
    places, block_size = torch.arange(IDS.shape[1]), backend.cache.block_size
    starts, lengths, table = torch.tensor([0, len(places)]), torch.tensor([len(places)]), torch.tensor([[1]])
    adapters = None if adapter is None else torch.full_like(IDS[0], adapter)
    inputs = StepInputs(IDS[0], places, block_size + places, starts, lengths, table, adapters_T=adapters)
    return backend.prefill(inputs, places).clone()


def matrices_of(model):
    return [
        name for name, weight in model.named_parameters() if weight.dim() > 1 and not name.endswith("mlp.gate.weight")
    ]


def stored_weights(model, name):
    """The weights [O, I] of a plain layer, or of all experts."""
    layer = model.get_submodule(name.removesuffix(".rows") if ".experts." in name else name)
    return layer[:].flatten(0, 1) if isinstance(layer, ExpertStack) else layer.dequantize(torch.float32)


EXPERT_SIZES = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256}
ON_KERNELS = [
    *(("qwen-2", "qwen2", {}, kind) for kind in TYPES if kind not in FLOAT_TYPES),
    ("qwen-2", "qwen2", {}, mixed),
    ("qwen-3-moe-normalized", "qwen3moe", EXPERT_SIZES, mixed),
    ("qwen-3-moe-normalized", "qwen3moe", EXPERT_SIZES, "MXFP4"),
]


@pytest.mark.parametrize(
    ("family", "architecture", "values", "kind"),
    ON_KERNELS,
    ids=[f"{architecture}-{kind if isinstance(kind, str) else 'mixed'}" for _, architecture, _, kind in ON_KERNELS],
)
def test_kernels_compute_what_the_file_holds(tmp_path, biased, family, architecture, values, kind):
    has_experts = {"num_experts": 4, "moe_intermediate_size": 256, "hidden_size": 256, "intermediate_size": 256}
    model = biased if architecture == "qwen2" else reference(family, **has_experts)
    path, _ = written_twice(tmp_path, model, architecture, values_of(model.config, **values), kind)
    need_cpu_kernels()
    plain = load_model(path, dtype=torch.float32, forms=KeptForms(groups="cpu"))
    arrived = packer(path, read_architecture(path, KeptForms(groups="cpu")), torch.float32)
    by_layers = load_model(path, dtype=torch.float32, forms=KeptForms(groups="cpu"), arrived=arrived)
    found = network_of(path, kv_cache_dtype="float32")
    assert found.decode_path == "CPU kernels"
    assert matrices_of(found.model) == []
    for name, layer in found.model.named_modules():  # scales are rounded
        if isinstance(layer, PackedLinear) and layer.has_integers:
            weights = stored_weights(plain, name)
            assert (layer.dequantize(torch.float32) - weights).abs().max() < 2**-7 * weights.abs().max(), name
    expected, logits = logits_of(by_layers), prefill(found)  # which both round inputs to 8 bits
    assert (logits - expected).norm() < 0.003 * expected.norm()


def test_a_file_that_is_quantized_anew_is_named_in_one_line(tmp_path, biased, caplog):
    path, _ = written_twice(tmp_path, biased, "qwen2", values_of(biased.config), "Q8_0")
    with caplog.at_level(logging.INFO):
        loaded_on_cpu(path, quantization="int8")
    assert "quantized anew to int8; leave quantization out to keep those of the file" in caplog.text
    assert "dequantized" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_adapters_are_added_to_projections_of_several_types(tmp_path, biased):
    need_cpu_kernels()
    path, _ = written_twice(tmp_path, biased, "qwen2", values_of(biased.config), mixed)
    loaded = loaded_on_cpu(path, kv_cache_dtype="float32")
    weights = {
        name.removesuffix(".weight"): weight for name, weight in biased.state_dict().items() if "_proj.w" in name
    }
    folder = write_adapter(tmp_path / "adapter", {name: tuple(weight.shape) for name, weight in weights.items()})
    loaded.adapters.load(1, folder)
    without, found = prefill(loaded.backend), prefill(loaded.backend, adapter=1)
    expected = prefill(loaded.backend._eager, adapter=1)
    assert (found - without).norm() > 0.1 * without.norm()
    assert (found - expected).norm() < 0.003 * expected.norm()


def test_other_devices_and_settings_have_the_old_layouts(tmp_path, biased):
    """The kernels of GPUs read another form; what is quantized again while it is loaded starts from floats."""
    path, _ = written_twice(tmp_path, biased, "qwen2", values_of(biased.config), mixed)
    for options in ({"compile": False}, {"quantization": "int4"}):
        backend = network_of(path, **options)
        kinds = {type(module) for module in backend.model.modules()}
        assert not kinds & {GroupedLinear, JoinedLinear, RowEmbedding}
    cpu, gpu, config = torch.device("cpu"), torch.device("cuda"), EngineConfig()
    assert not can_keep_groups(config, gpu, None)
    assert can_keep_groups(config, cpu, None) == kernels.can_load()


def test_elsewhere_mixed_types_keep_whole_modules_of_4_bits(tmp_path, caplog):
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


@pytest.mark.parametrize("groups", [None, "cpu"])
def test_experts_stay_as_they_are_or_the_log_says_that_they_are_dequantized(tmp_path, caplog, groups):
    model = reference("mixtral", sliding_window=None, hidden_size=32, intermediate_size=64)
    kinds = {"experts.down": "Q8_0", "1.mlp.experts.up": "Q5_1"}  # beside gates of another type
    paths = written_twice(
        tmp_path,
        model,
        "llama",
        values_of(model.config, **EXPERTS),
        lambda name: next((kind for part, kind in kinds.items() if part in name), "Q4_0"),
    )
    with caplog.at_level(logging.WARNING):
        found, expected = (load_model(path, dtype=torch.float32, forms=KeptForms(groups=groups)) for path in paths)
    torch.testing.assert_close(logits_of(found), logits_of(expected), rtol=1e-4, atol=1e-4)
    if groups is None:
        assert "6 stacks of experts are dequantized too" in caplog.text
        return
    assert "2 tensors are dequantized" in caplog.text
    first, second = (layer.mlp.experts for layer in found.model.layers[:2])
    assert isinstance(first.gate_up_proj, ExpertStack)
    assert isinstance(first.down_proj, ExpertStack)
    assert isinstance(second.gate_up_proj, torch.nn.Parameter)
    assert isinstance(second.down_proj, ExpertStack)


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
