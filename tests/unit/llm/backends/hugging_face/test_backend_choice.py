"""Networks of transformers generate in the engine what `generate` of transformers writes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from flambeau.llm import SamplingParams
from flambeau.llm.backends.hugging_face.attention import NotPageable
from flambeau.llm.backends.hugging_face.backend_choice import (
    check_positions,
    check_prompt_layers,
    check_settings,
    depends_on_length,
    layer_types,
)
from flambeau.llm.backends.hugging_face.causal_model import CausalModel
from flambeau.llm.backends.hugging_face.paged_backend import PagedBackend
from flambeau.llm.backends.hugging_face.sequence_backend import SequenceBackend
from flambeau.llm.backends.hugging_face.state_backend import StateBackend
from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.loader import load_engine, reason_for_transformers
from support.checkpoints import reference
from support.other_networks import (
    NEW_TOKENS,
    OTHERS,
    TINY,
    VOCAB_SIZE,
    engine_of,
    greedy_tokens,
    load_other,
    some_prompts,
    write_other,
)
from support.tokenizer_files import byte_level_json, write_json_tokenizer

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch.jit.script, in GPTBigCode
WAYS = {"paged": PagedBackend, "states": StateBackend, "caches": SequenceBackend}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


def texts(engine, prompts, params=GREEDY):
    return [completion.token_ids for completion in engine.generate(prompts, params)]


@pytest.mark.parametrize("name", OTHERS)
def test_tokens_are_those_of_generate(tmp_path, name, caplog):
    """Alone and in a mixed batch: prompts of several lengths in chunks, beside sequences that decode."""
    network = write_other(tmp_path, name)
    prompts = some_prompts()
    expected = [greedy_tokens(network, prompt) for prompt in prompts]
    loaded = load_other(tmp_path)
    engine = engine_of(loaded)
    assert isinstance(loaded.backend, WAYS[OTHERS[name].way])
    assert loaded.whole_prompts == OTHERS[name].whole_prompts
    lines = [line for line in caplog.messages if type(network).__name__ in line]
    assert len(lines) == 1
    assert "transformers" in lines[0]
    assert texts(engine, prompts) == expected
    assert texts(engine, prompts[:1]) == expected[:1]
    assert engine.state.num_blocks_used == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One network for each way."""
    made = {}
    for name in ("JetMoe", "Bamba", "CodeGen", "Mamba"):
        made[name] = tmp_path_factory.mktemp(name)
        write_other(made[name], name)
    return made


@pytest.mark.parametrize("name", ["JetMoe", "Bamba", "CodeGen"])
def test_preempted_sequences_continue_with_the_same_tokens(folders, name):
    prompts = some_prompts()
    expected = texts(engine_of(load_other(folders[name])), prompts)
    engine = engine_of(load_other(folders[name], num_blocks=15))
    assert texts(engine, prompts) == expected
    assert engine.state.num_preempted > 0
    assert engine.state.num_blocks_used == 0


@pytest.mark.parametrize("name", ["JetMoe", "Bamba", "Mamba"])
def test_log_probabilities_are_those_of_the_network(folders, name):
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
    engine = engine_of(load_other(folders[name]))
    prompt = some_prompts()[0]
    params = replace(GREEDY, logprobs=2, max_tokens=4)
    engine.add("one", prompt, params, scores_prompt=True)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    ids = [*prompt, *(token for output in outputs for token in output.token_ids)]
    with torch.inference_mode():
        expected = network(torch.tensor([ids])).logits[0].log_softmax(-1)
    found = [info.logprob for info in outputs[0].prompt_tokens]
    found += [info.logprob for output in outputs for info in output.tokens]
    wanted = expected[range(len(ids) - 1), ids[1:]]
    torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=0)


def test_prefixes_are_reused_with_paged_attention(folders):
    engine = engine_of(load_other(folders["JetMoe"]))
    prompt = some_prompts()[3]
    first = texts(engine, [prompt])
    engine.add("again", prompt, GREEDY)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [token for output in outputs for token in output.token_ids] == first[0]
    assert outputs[-1].counts.num_cached > 0


def test_proposals_from_the_text_change_nothing(folders):
    prompts = [prompt * 2 for prompt in some_prompts()[:2]]
    expected = texts(engine_of(load_other(folders["JetMoe"])), prompts)
    engine = engine_of(load_other(folders["JetMoe"], speculation="lookup", speculate_k=3))
    assert engine.info.speculation == "lookup"
    assert texts(engine, prompts) == expected


def test_a_draft_of_the_own_network_changes_nothing(folders, tmp_path):
    reference("llama-2", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    expected = texts(engine_of(load_other(folders["JetMoe"])), some_prompts())
    engine = engine_of(load_other(folders["JetMoe"], draft=str(tmp_path), speculate_k=2))
    assert engine.info.speculation == "draft"
    assert texts(engine, some_prompts()) == expected


def test_proposals_are_off_where_a_state_cannot_be_taken_back(folders, caplog):
    engine = engine_of(load_other(folders["Bamba"], speculation="lookup"))
    assert engine.info.speculation is None
    assert not engine.config.prefix_cache
    assert "speculation is off" in caplog.text


def test_seeded_choices_are_the_same_in_a_batch_and_alone(folders):
    engine = engine_of(load_other(folders["Bamba"]))
    params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=8, ignore_eos=True)
    prompts = some_prompts()[:2]
    together = texts(engine, prompts, params)
    assert together == [tokens for prompt in prompts for tokens in texts(engine, [prompt], params)]


def test_memory_of_states_bounds_the_sequences(folders):
    loaded = load_other(folders["Bamba"], num_blocks=None, kv_cache_bytes=100_000, max_num_seqs=64)
    assert 1 <= loaded.config.max_num_seqs < 64
    assert texts(engine_of(loaded), some_prompts()) == texts(engine_of(load_other(folders["Bamba"])), some_prompts())


@pytest.mark.parametrize("name", ["Bamba", "CodeGen"])
def test_nothing_is_kept_for_sequences_that_have_left(folders, name):
    loaded = load_other(folders[name])
    engine = engine_of(loaded)
    engine.add("one", some_prompts()[0], GREEDY)
    engine.add("two", some_prompts()[1], GREEDY)
    for _ in range(6):
        engine.step()
    engine.cancel("one")
    while engine.has_work:
        engine.step()
    assert not loaded.backend._states
    assert not getattr(loaded.backend, "_stacked", {})


def test_positions_of_longrope_are_those_of_generate(tmp_path):
    """A sequence that gets longer than the original length is computed again, with other factors."""
    from transformers import Phi3Config, Phi3ForCausalLM

    short, long = [1.0 + 0.3 * i for i in range(4)], [2.0 + 0.5 * i for i in range(4)]
    scaling = {"type": "longrope", "short_factor": short, "long_factor": long, "factor": 2.0}
    config = Phi3Config(
        **TINY | {"max_position_embeddings": 64},
        original_max_position_embeddings=32,
        rope_scaling=scaling,
        pad_token_id=0,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    network = Phi3ForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in network.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(tmp_path)
    prompts = some_prompts()[:3]
    loaded = load_other(tmp_path)
    assert loaded.whole_prompts
    assert texts(engine_of(loaded), prompts) == [greedy_tokens(network, prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"quantization": "int8"}, "quantization"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"kv_host_memory_mb": 64}, "kv_host_memory_mb"),
        ({"kv_disk_folder": "blocks"}, "kv_disk_folder"),
        ({"lora_adapters": {"a": "b"}}, "lora_adapters"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel.*leave it out"),
    ],
)
def test_settings_of_the_own_network_are_refused_by_name(options, name):
    with pytest.raises(LLMError, match=name):
        check_settings(EngineConfig(**options))


def test_a_row_of_the_table_stays_with_the_own_network(tmp_path, folders):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert reason_for_transformers(tmp_path, EngineConfig()) is None  # incomplete, which is said when it is read
    assert "JetMoe" in (reason_for_transformers(folders["JetMoe"], EngineConfig()) or "")
    assert reason_for_transformers(folders["JetMoe"], EngineConfig(model_impl="flambeau")) is None
    tokenizer = write_json_tokenizer(tmp_path, byte_level_json())
    with pytest.raises(CheckpointError, match="JetMoe"):
        load_engine(folders["JetMoe"], model_impl="flambeau", tokenizer=str(tokenizer))


def test_a_missing_transformers_is_not_announced_as_imported(folders, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with caplog.at_level("INFO"), pytest.raises(LLMError, match=r"flambeau\[transformers\]"):
        load_engine(folders["JetMoe"], tokenizer=str(write_json_tokenizer(tmp_path, byte_level_json())))
    assert not caplog.records


@pytest.mark.parametrize(("length", "expected"), [(32, False), (33, True)])
def test_longrope_depends_on_the_length(length, expected):
    from transformers import Phi3Config

    factors = [1.0] * 4
    config = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=64,
        original_max_position_embeddings=32,
        rope_scaling={"type": "longrope", "short_factor": factors, "long_factor": factors},
    )
    assert depends_on_length(config, length) == expected


def test_layers_that_know_where_the_prompt_ends_are_refused():
    """Those of Unlimited-OCR keep the whole prompt and a window of the generated text."""
    import transformers

    config = transformers.UnlimitedOcrConfig()
    with pytest.raises(CheckpointError, match="reference_sliding_attention"):
        check_prompt_layers("UnlimitedOcrForConditionalGeneration", layer_types(config))
    check_prompt_layers("LlamaForCausalLM", layer_types(transformers.LlamaConfig()))


def test_layers_of_an_unknown_type_are_not_paged(tmp_path):
    network = write_other(tmp_path, "JetMoe")
    arch = load_other(tmp_path).arch
    check_positions(CausalModel(network), arch, EngineConfig())
    network.config.layer_types = ["full_attention", "compressed_sparse_attention"]
    with pytest.raises(NotPageable, match="compressed_sparse_attention"):
        check_positions(CausalModel(network), arch, EngineConfig())
