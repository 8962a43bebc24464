"""The network finds what transformers finds, for every family: without a cache, from the cache, and token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flambeau.llm.backends.cpu.network import CpuNetwork, can_compute
from flambeau.llm.backends.cpu.packed_experts import PackedStack
from flambeau.llm.backends.eager import PagedAttention, WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.checkpoints.quantized import save_quantized
from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import CheckpointError
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.network_loader import load_network
from flambeau.llm.quantize.quantizer import CudaCodedStack, ExpertStack, quantize_on_load
from flambeau.llm.quantize.row_scaled import Int8Linear
from support.checkpoints import KINDS, LENGTH, VOCAB_SIZE, read_checkpoint, write_checkpoint
from support.cpu_kernels import need_cpu_kernels
from support.llm_steps import step_inputs
from support.ranks import logits_in_threads

BLOCK_SIZE, NUM_BLOCKS = 8, 8
TOLERANCE = {"atol": 5e-5, "rtol": 0.0}
# Its logits are up to 14: float32 is up to 1.4e-4 from float64, in transformers as here.
OWN_TOLERANCE = {"vault-gemma": {"atol": 1e-4, "rtol": 0.0}}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], tuple[Transformer, Any]]:
    """A kind's network, loaded from the folder transformers wrote, and the one of transformers."""
    made: dict[str, tuple[Transformer, Any]] = {}

    def make(kind: str) -> tuple[Transformer, Any]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            reference = write_checkpoint(folder, kind)
            made[kind] = load_model(folder), reference
        return made[kind]

    return make


def some_ids(length: int = LENGTH) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(7)).tolist()


def reference_logits(reference: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([ids])).logits[0].float()


def cache_for(model: Transformer) -> KVCache:
    cache = KVCache(model.arch, 1 + NUM_BLOCKS, BLOCK_SIZE)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(50.0)  # rubbish that nobody may look at
    return cache


def step(
    model: Transformer, cache: KVCache, num_cached: int, ids: list[int], query_len: int = 0, forward: Any = None
) -> Tensor:
    """The logits of the next tokens of one sequence."""
    inputs = next_tokens(num_cached, ids, query_len)
    with torch.no_grad(), model.rotation.for_length(LENGTH):
        return model.logits(
            (model if forward is None else forward)(inputs.ids_T, inputs.positions_T, PagedAttention(cache, inputs))
        )


def next_tokens(num_cached: int, ids: list[int], query_len: int = 0) -> StepInputs:
    """The next tokens of one sequence, whose blocks lie in memory from back to front."""
    end = num_cached + len(ids)
    blocks = list(range(NUM_BLOCKS, 0, -1))
    places = range(num_cached, end)
    return StepInputs(
        ids_T=torch.tensor(ids),
        positions_T=torch.tensor(places),
        slots_T=torch.tensor([blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in places]),
        query_starts=torch.tensor([0, len(ids)]),
        context_lens_S=torch.tensor([end]),
        block_tables_SB=torch.tensor([blocks[: -(-end // BLOCK_SIZE)]]),
        query_len=query_len,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(checkpoint, kind):
    model, reference = checkpoint(kind)
    ids = some_ids()
    expected = reference_logits(reference, ids)
    whole = whole_logits(model, ids)
    torch.testing.assert_close(whole, expected, **OWN_TOLERANCE.get(kind, TOLERANCE))
    cache = cache_for(model)
    chunks = [step(model, cache, start, ids[start : start + 20]) for start in range(0, LENGTH, 20)]
    torch.testing.assert_close(torch.cat(chunks), expected, **OWN_TOLERANCE.get(kind, TOLERANCE))


# Parts that few families have; those of others are compared with the plain network in test_network.py.
KERNEL_KINDS = [
    *(
        kind
        for kind in KINDS
        if "kv_lora_rank" in KINDS[kind].options and kind not in ("mistral-4", "longcat", "dots-3-plain")
    ),
    *("llama-4", "llama-4-two-experts", "ministral-3", "phi-moe", "phi-moe-long", "opt-350m"),
    *("apertus", "nanochat", "persimmon", "hyperclova-x", "vault-gemma", "granite-swa", "hy-3", "cohere-2-moe"),
    *("gpt-1", "codegen", "biogpt", "gemma-4", "gemma-4-moe", "gemma-4-unified", "afmoe", "laguna"),
    *("dbrx", "flint", "kolibri", "aria", "xglm", "modern-bert", "modern-bert-biased", "step-3.7"),
]


@pytest.mark.timeout(300)  # the kernels may have to be built, on a busy machine
@pytest.mark.parametrize("kind", KERNEL_KINDS)
def test_the_cpu_kernels_give_the_logits_of_transformers(checkpoint, kind):
    need_cpu_kernels()
    model, reference = checkpoint(kind)
    cache, ids = cache_for(model), some_ids()
    assert can_compute(model, cache), model.arch.extras
    network = CpuNetwork(model, cache)
    with torch.inference_mode(), model.rotation.for_length(LENGTH):
        found = [network.run(next_tokens(start, ids[start : start + 20])) for start in range(0, 40, 20)]
        found += [network.run(next_tokens(place, ids[place : place + 1], query_len=1)) for place in range(40, LENGTH)]
    torch.testing.assert_close(torch.cat(found), reference_logits(reference, ids), **OWN_TOLERANCE.get(kind, TOLERANCE))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(checkpoint, kind):
    model, reference = checkpoint(kind)
    ids = some_ids(20)
    cache = cache_for(model)
    found = [step(model, cache, 0, ids)]
    for _ in range(30):
        ids.append(int(found[-1][-1].argmax()))
        found.append(step(model, cache, len(ids) - 1, ids[-1:], query_len=1))
    expected = reference_logits(reference, ids)  # each row says what follows the tokens before it
    assert expected[19:-1].argmax(-1).tolist() == ids[20:]
    torch.testing.assert_close(torch.cat(found), expected, **OWN_TOLERANCE.get(kind, TOLERANCE))


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_that_transformers_writes_is_understood(checkpoint, kind):
    assert checkpoint(kind)[0].arch.unknown_keys == ()


def test_a_key_that_is_not_known_is_warned_of_by_name(tmp_path, caplog):
    write_checkpoint(tmp_path, "llama-2")
    load_model(tmp_path)
    assert not own_levels(caplog)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attn_temperature": 2.0}))
    load_model(tmp_path)
    assert own_levels(caplog) == ["WARNING"]
    assert "attn_temperature" in caplog.text


def test_the_kinds_differ_where_they_should(checkpoint):
    """A window, a stretched position or a missing rotation that changed nothing would prove nothing."""
    arch = {kind: checkpoint(kind)[0].arch for kind in ("mistral", "qwen-2-windows", "qwen-3-windows", "smol-lm-3")}
    assert arch["mistral"].windows == (9, 9)
    assert arch["qwen-2-windows"].windows == (None, 9)
    assert arch["qwen-3-windows"].windows == (7, None)
    assert arch["smol-lm-3"].unrotated_layers == {1}
    assert checkpoint("qwen-3-moe")[0].arch.dense_layers == {0, 2, 3}
    assert checkpoint("qwen-2.5-yarn")[0].arch.rope_scaling.kind == "yarn"


def test_a_batch_of_whole_sequences_is_computed_as_one(checkpoint):
    model, reference = checkpoint("qwen-3")
    ids = torch.tensor([some_ids()[:12], some_ids()[12:24]])
    with torch.inference_mode():
        found = model.logits(model(ids, torch.arange(12).expand(2, 12), WholeAttention()))
        torch.testing.assert_close(found, reference(ids).logits, **TOLERANCE)


def test_a_sharded_checkpoint_of_transformers_in_bfloat16_is_loaded_in_its_own_type(tmp_path):
    write_checkpoint(tmp_path, "llama-3.1", dtype=torch.bfloat16, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = load_model(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    found = load_model(tmp_path, dtype=torch.float32)
    ids = some_ids()
    expected = reference_logits(read_checkpoint(tmp_path), ids)
    with torch.inference_mode():
        logits = found.logits(found(torch.tensor(ids), torch.arange(LENGTH), WholeAttention()))
    torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_the_older_spelling_of_rotary_parameters_gives_the_same_logits(checkpoint, tmp_path):
    model, _ = checkpoint("llama-3.1")
    write_checkpoint(tmp_path, "llama-3.1")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    path.write_text(json.dumps({**config, "rope_scaling": scaling, "torch_dtype": "float32"}))
    older = load_model(tmp_path)
    assert older.arch == model.arch
    ids = torch.tensor(some_ids())
    found, expected = (m(ids, torch.arange(LENGTH), WholeAttention()) for m in (older, model))
    assert torch.equal(found, expected)


def test_short_sequences_have_the_short_factors_of_longrope(checkpoint):
    model, reference = checkpoint("phi-3-long")
    ids = some_ids(16)  # as many as the model was trained on
    torch.testing.assert_close(whole_logits(model, ids), reference_logits(reference, ids), **TOLERANCE)


@pytest.mark.parametrize(
    "kind",
    [
        "llama-3.1",
        "qwen-3",
        "mixtral",
        "gpt-oss",
        "qwen-2-moe",
        "gpt-2",
        "bloom",
        "olmo",
        "deepseek-v2",
        "llama-4",
        "gemma-4",
        "longcat",
    ],
)
def test_a_step_of_even_length_is_traced_without_a_break(checkpoint, kind):
    model, _ = checkpoint(kind)
    ids, cache = some_ids(20), cache_for(model)
    step(model, cache, 0, ids)
    expected = step(model, cache, 20, [5], query_len=1)
    torch._dynamo.reset()
    traced = torch.compile(model, backend="eager", fullgraph=True)
    found = step(model, cache, 20, [5], query_len=1, forward=traced)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


OTHER_FILES = (  # kinds whose files have other names, or another arrangement, than the network
    "gemma-2",
    "glm-4",
    "cohere",
    "cohere-qk-norm",
    "stable-lm-2-12b",
    "phi-2",
    "nemotron",
    "olmo",
    "olmoe",
    "qwen-2-moe",
    "granite-moe-shared",
    "glm-4.5",
    "gpt-oss",
    "deepseek-v2-lite",
    "deepseek-v3",
    "minicpm-3",
    "llama-4",
    "phi-moe",
    "hunyuan-moe",
    "ernie-4.5-moe",
    "starcoder-all-heads",
    "gpt-2",
    "gpt-j",
    "gpt-neox",
    "falcon-40b",
    "opt-350m",
    "opt",
    "bloom",
    "mpt",
)


@pytest.mark.parametrize("kind", OTHER_FILES)
def test_quantized_on_load_and_read_from_quantized_files_it_is_the_same_network(kind, tmp_path):
    reference = write_checkpoint(tmp_path / "original", kind)
    save_quantized(tmp_path / "original", tmp_path / "small", "int8")
    arch = read_architecture(tmp_path / "original")
    on_load = load_model(tmp_path / "original", arrived=quantize_on_load("int8", arch))
    from_files = load_model(tmp_path / "small", dtype=torch.float32)
    assert any(isinstance(module, Int8Linear) for module in on_load.modules())
    ids = some_ids()
    found, expected = whole_logits(on_load, ids), reference_logits(reference, ids)
    torch.testing.assert_close(whole_logits(from_files, ids), found, **TOLERANCE)
    if not arch.num_experts:  # a router may choose others
        assert (found - expected).norm() < 0.1 * expected.norm()


SHARDED = (
    "cohere-qk-norm",
    "stable-lm-2-12b",
    "nemotron",
    "olmo",
    "qwen-2-moe",
    "granite-moe-shared",
    "glm-4.5",
    "gpt-oss",
    "deepseek-v2-lite",
    "deepseek-v3",
    "minicpm-3",
    "llama-4",
    "phi-moe",
    "hunyuan-moe",
    "ernie-4.5-moe",
    "starcoder",
    "opt-350m",
    "gpt-2",
    "gpt-j",
    "gpt-neox",
    "falcon-7b",
    "falcon-40b",
    "opt",
)


@pytest.mark.parametrize("kind", SHARDED)
def test_two_ranks_find_what_one_finds(kind, tmp_path, monkeypatch):
    reference, ids = write_checkpoint(tmp_path, kind), some_ids()
    for found in logits_in_threads(tmp_path, 2, ids, monkeypatch):
        torch.testing.assert_close(found, reference_logits(reference, ids), **TOLERANCE)


def test_layers_for_further_tokens_are_left_out_if_the_configuration_counts_them(tmp_path):
    reference = write_checkpoint(tmp_path, "glm-4.5")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.ones(32, 64)}, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for number in (0, 1):
        file.write_text(json.dumps({**config, "num_nextn_predict_layers": number}))
        if number == 0:
            with pytest.raises(CheckpointError, match="eh_proj"):
                load_model(tmp_path)
    model = load_model(tmp_path)
    torch.testing.assert_close(whole_logits(model, some_ids()), reference_logits(reference, some_ids()), **TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama-4", "Llama4ForConditionalGeneration"),
        ("mistral", "Mistral3ForConditionalGeneration"),
        ("ministral-3", "Mistral3ForConditionalGeneration"),
    ],
)
def test_the_language_model_of_a_checkpoint_with_pictures_is_loaded_alone(tmp_path, kind, name):
    reference = write_checkpoint(tmp_path, kind)
    tensors = {f"language_model.{name}": t for name, t in load_file(tmp_path / "model.safetensors").items()}
    tensors |= {
        "vision_model.class_embedding": torch.ones(8),
        "multi_modal_projector.linear_1.weight": torch.ones(8, 8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    text = json.loads(file.read_text())
    whole = {"architectures": [name], "model_type": "with-pictures", "vision_config": {"a": 1}}
    file.write_text(json.dumps({**whole, "text_config": text}))
    model = load_model(tmp_path)
    assert model.arch.unknown_keys == ()
    assert model.arch.vision is not None
    torch.testing.assert_close(whole_logits(model, some_ids()), reference_logits(reference, some_ids()), **TOLERANCE)


def test_deepseek_in_blocks_of_fp8_is_dequantized(tmp_path):
    reference = write_checkpoint(tmp_path, "deepseek-v3")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("_proj.weight", "_mqa.weight"))]:
        scale = tensors[name].abs().max() / 448
        stored = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors |= {
            name: stored,
            f"{name}_scale_inv": scale.expand(*(-(-size // 128) for size in stored.shape)).clone(),
        }
        plain = stored.float() * scale
        if name in dict(reference.named_parameters()):
            reference.get_parameter(name).copy_(plain)
            continue
        stack, expert, projection = re.fullmatch(r"(.*experts)\.(\d+)\.(\w+)\.weight", name).groups()
        fused = reference.get_parameter(f"{stack}.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}")
        rows = {"gate_proj": slice(0, 32), "up_proj": slice(32, 64), "down_proj": slice(None)}[projection]
        fused[int(expert), rows] = plain
    save_file(tensors, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": method}))
    model = load_model(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(whole_logits(model, some_ids()), reference_logits(reference, some_ids()), **TOLERANCE)


def write_mxfp4(tmp_path):
    """A checkpoint of gpt-oss with experts in MXFP4, and the network of transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    reference = write_checkpoint(tmp_path, "gpt-oss")
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (count, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 127, (count, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        reference.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales))
    save_file(tensors, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": method}))
    return reference


def test_weights_in_mxfp4_are_dequantized_with_a_warning_or_stay_as_fp8_or_as_codes(tmp_path, caplog):
    reference = write_mxfp4(tmp_path)
    model = load_model(tmp_path)
    torch.testing.assert_close(whole_logits(model, some_ids()), reference_logits(reference, some_ids()), **TOLERANCE)
    assert own_levels(caplog) == ["WARNING"]
    assert "MXFP4" in caplog.text
    kept = load_model(tmp_path, dtype=torch.float32, forms=KeptForms(blocks=True))
    assert kept.model.layers[0].mlp.experts.down_proj.weight.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(whole_logits(kept, some_ids()), reference_logits(reference, some_ids()), **TOLERANCE)
    coded = load_model(
        tmp_path,
        dtype=torch.float32,
        forms=KeptForms(blocks=True, codes=True),
        arrived=lambda _, module: CudaCodedStack(module) if isinstance(module, ExpertStack) else None,
    )
    weights = coded.model.layers[0].mlp.experts.down_proj
    assert isinstance(weights, CudaCodedStack)
    assert weights.get_buffer("weight").nbytes == kept.model.layers[0].mlp.experts.down_proj.weight.nbytes // 2
    torch.testing.assert_close(whole_logits(coded, some_ids()), reference_logits(reference, some_ids()), **TOLERANCE)


def test_weights_in_mxfp4_stay_in_4_bits_on_the_cpu_kernels(tmp_path):
    need_cpu_kernels()
    reference = write_mxfp4(tmp_path)
    config = EngineConfig(device="cpu", num_blocks=16, block_size=4)
    backend = load_network(tmp_path, config, torch.device("cpu"), None).backend
    assert backend.decode_path == "CPU kernels"
    stacks = [module for module in backend.model.modules() if isinstance(module, PackedStack)]
    assert {stack.rows.kind for stack in stacks} == {"fp4"}
    ids = some_ids(30)
    logits = backend.prefill(step_inputs({0: (0, ids)}), torch.arange(len(ids)))
    torch.testing.assert_close(logits, reference_logits(reference, ids), **TOLERANCE)
    backend.close()


REMOVED = object()
EDITED = {  # config.json as people change it; transformers reads the same file
    "rope-scaling-beside-parameters": (
        "qwen-3",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "rope-scaling-with-theta": (
        "llama-3",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}},
    ),
    "mistral-with-layer-types": ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}),
    "smol-lm-3-without-theta": ("smol-lm-3", {"rope_parameters": REMOVED, "rope_theta": REMOVED}),
}


@pytest.mark.parametrize("name", EDITED)
def test_edited_configuration_means_what_it_means_to_transformers(name, tmp_path):
    kind, changes = EDITED[name]
    write_checkpoint(tmp_path, kind)
    file = tmp_path / "config.json"
    before = json.loads(file.read_text())
    config = {key: value for key, value in {**before, **changes}.items() if value is not REMOVED}
    ids = some_ids()
    unedited = load_model(tmp_path)
    file.write_text(json.dumps(config))
    ours, theirs = load_model(tmp_path), read_checkpoint(tmp_path)
    logits = whole_logits(ours, ids)
    torch.testing.assert_close(logits, reference_logits(theirs, ids), **TOLERANCE)
    assert (logits - whole_logits(unedited, ids)).abs().max() > 0.01, "the change has no effect"


def own_levels(caplog) -> list[str]:
    """The levels of our own log lines; transformers has others."""
    return [record.levelname for record in caplog.records if record.name.startswith("flambeau")]


def whole_logits(model: Transformer, ids: list[int]) -> Tensor:
    with torch.inference_mode(), model.rotation.for_length(len(ids)):
        positions = torch.arange(len(ids))
        return model.logits(model(torch.tensor(ids), positions, WholeAttention()))
