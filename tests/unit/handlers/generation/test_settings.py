"""What a model-config.yaml says of a language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flambeau.errors import HandlerError
from flambeau.handlers.generation.settings import read_settings, shortened
from flambeau.llm.sampling_params import SamplingParams
from support.log_records import logged

SPECULATIVE = """
minWorkers: 1
maxWorkers: 1
handler:
    model_path: "path/to/gpt_fast_7b"
    tokenizer_path: "path/to/tokenizer.model"
    compile: true
    speculative: true
    draft_model_path: "path/to/gpt_fast_68m"
    speculate_k: 5
    max_new_tokens: 256
    temperature: 0.8
    top_k: 200
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    model = tmp_path / "model"
    for name in ("gpt_fast_7b", "gpt_fast_68m"):
        (model / "path" / "to" / name).mkdir(parents=True)
    (model / "path" / "to" / "tokenizer.model").touch()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return model


def read(config, folder, **options):
    return read_settings(yaml.safe_load(config), folder, device="cpu", **options)


def test_settings_of_the_speculative_example(folder):
    settings = read(SPECULATIVE, folder)
    assert settings.model_path == folder / "path/to/gpt_fast_7b"
    engine = settings.engine
    assert (engine.draft, engine.speculation, engine.speculate_k) == (
        str(folder / "path/to/gpt_fast_68m"),
        "draft",
        5,
    )
    assert (engine.tokenizer, engine.compile) == (str(folder / "path/to/tokenizer.model"), True)
    assert settings.sampling == SamplingParams(max_tokens=256, temperature=0.8, top_k=200)


def test_draft_is_left_alone_unless_speculation_is_on(folder):
    settings = read(SPECULATIVE.replace("speculative: true", "speculative: false"), folder)
    assert (settings.engine.draft, settings.engine.speculation) == ("", None)


def test_speculation_without_a_draft_looks_up_the_prompt(folder):
    assert read("handler: {speculative: true}", folder).engine.speculation == "lookup"


def test_speculation_by_the_models_own_layer(folder):
    assert read("handler: {speculative: mtp}", folder).engine.speculation == "mtp"
    with pytest.raises(HandlerError, match="leave it out, or set speculative: true"):
        read("handler: {speculative: mtp, draft_model_path: path/to/gpt_fast_68m}", folder)
    with pytest.raises(HandlerError, match="speculative must be true, false or mtp, not 'eagle'"):
        read("handler: {speculative: eagle}", folder)


def test_older_names_and_places_are_understood(folder):
    (folder / "path/to/gpt_fast_7b/model.pth").touch()
    settings = read(
        """
        handler:
            converted_ckpt_dir: path/to/gpt_fast_7b/model.pth
            draft_checkpoint_path: path/to/gpt_fast_68m
            fx_graph_cache: true
            profile: trace
            stream: true
        max_new_tokens: 50
        """,
        folder,
    )
    assert settings.model_path == folder / "path/to/gpt_fast_7b"
    assert settings.engine.speculation == "draft"
    assert (settings.stream, settings.sampling.max_tokens) == (True, 50)


def test_our_own_settings_reach_the_engine(folder):
    settings = read(
        """
        resume: true
        handler: {dtype: bfloat16, quantization: int8, max_num_seqs: 4, max_model_len: 99, kv_cache_fraction: 0.5,
                  kv_cache_dtype: fp8,
                  num_blocks: 7, prefix_cache: false, tensor_parallel_size: 2, name: gpt_handler}
        """,
        folder,
    )
    engine = settings.engine
    assert (engine.dtype, engine.quantization, engine.max_num_seqs, engine.max_model_len) == (
        "bfloat16",
        "int8",
        4,
        99,
    )
    assert (engine.kv_cache_fraction, engine.num_blocks, engine.prefix_cache) == (0.5, 7, False)
    assert engine.kv_cache_dtype == "fp8"
    assert (settings.resume, settings.tensor_parallel_size, settings.model_path) == (True, 2, folder)


def test_a_folder_for_prefixes_leads_from_the_servers_folder(folder):
    engine = read("handler: {kv_host_memory_mb: 64, kv_disk_folder: blocks, kv_disk_mb: 5}", folder).engine
    assert (engine.kv_host_memory_mb, engine.kv_disk_mb) == (64, 5)
    assert engine.kv_disk_folder == str(Path.cwd() / "blocks")


def test_paths_lead_from_the_models_folder_and_then_from_the_servers(folder):
    Path("here").mkdir()
    assert read("handler: {model_path: here}", folder).model_path == Path.cwd() / "here"
    (folder / "here").mkdir()
    assert read("handler: {model_path: here}", folder).model_path == folder / "here"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("handler: {model_path: nowhere}", r"model_path is 'nowhere', and there is neither .*model/nowhere nor .*cwd"),
        ("handler: {tokenizer_path: t.model}", "tokenizer_path is 't.model', and there is neither"),
        ("handler: {model_path: meta-llama/Llama-2-7b}", "hf download meta-llama/Llama-2-7b --local-dir FOLDER"),
        (
            "handler: {max_new_token: 5}",
            "has max_new_token, which gpt_handler does not know; did you mean max_new_tokens",
        ),
        ("handler: {color: red}", "has color, which gpt_handler does not know; it may have model_path"),
        ("handler: {max_num_seqs: 0}", "max_num_seqs must be a whole number from 1, not 0"),
        ("handler: {kv_cache_fraction: 90}", "kv_cache_fraction must be a number from 0 to 1, not 90"),
        ("handler: {compile: maybe}", "compile must be true or false, not 'maybe'"),
        ("handler: {temperature: hot}", "temperature must be a number from 0 to 100, not 'hot'"),
        ("handler: {top_p: 0}", "handler: top_p must be a number above 0, up to 1, not 0"),
        ("handler: {top_k: -1}", "top_k must be a whole number from 0"),
        ("handler: {model_path: 5}", "model_path must be text, not 5"),
        ("handler: [model_path]", "must hold keys and values"),
    ],
)
def test_what_is_wrong_is_named_with_the_remedy(folder, config, reason):
    with pytest.raises(HandlerError, match=reason):
        read(config, folder)


def test_subclass_may_have_keys_of_its_own(folder, caplog):
    assert read("handler: {color: red, max_new_token: 5}", folder, allows_others=True).sampling.max_tokens == 256
    [(text,)] = logged(caplog, "flambeau.handlers.generation.settings")  # none about `color`
    assert "max_new_tokens" in text


def test_sequences_that_are_shorter_than_expected_are_reported():
    assert shortened(1024, None, 1024) is None
    assert shortened(512, 512, 1024) is None
    assert "no more than 1024 tokens" in shortened(1024, 5000, 1024)
    assert "the KV cache holds 800 tokens" in shortened(800, None, 1024)
    assert "the KV cache holds 800 tokens" in shortened(800, 1000, 1024)


def test_a_path_from_the_root_that_leads_nowhere_is_reported(folder):
    with pytest.raises(HandlerError, match="draft_model_path is '/no/such', and there is no such file or folder"):
        read("handler: {speculative: true, draft_model_path: /no/such}", folder)


def test_generation_config_sets_the_defaults_of_requests(tmp_path):
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 3}'
    )
    found = read_settings({"handler": {"top_k": 7}}, tmp_path, device="cpu").sampling
    assert (found.temperature, found.top_k, found.top_p, found.repetition_penalty) == (0.6, 7, 0.95, 1.05)
    assert found.max_tokens == 256
    without = read_settings({"handler": {"generation_config": False}}, tmp_path, device="cpu").sampling
    assert (without.temperature, without.top_k) == (1.0, 0)


def test_settings_of_generation_config_without_effect_are_warned_of_by_name(tmp_path, caplog):
    file = tmp_path / "generation_config.json"
    file.write_text('{"do_sample": true, "num_beams": 1, "typical_p": 1.0, "eos_token_id": 2, "bad_words_ids": null}')
    read_settings({"handler": {}}, tmp_path, device="cpu")
    assert not caplog.records
    file.write_text(
        '{"do_sample": false, "num_beams": 4, "no_repeat_ngram_size": 3, "typical_p": 0.9, "dola_layers": "low"}'
    )
    found = read_settings({"handler": {}}, tmp_path, device="cpu").sampling
    assert (found.no_repeat_ngram_size, found.typical_p) == (3, 0.9)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    [warning] = [record.getMessage() for record in caplog.records]
    assert all(name in warning for name in ("do_sample False", "num_beams 4", "dola_layers"))
    assert "no_repeat_ngram_size" not in warning


def test_invalid_generation_config_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(HandlerError, match=r"generation_config.json: top_p must be .*, not 7"):
        read_settings({}, tmp_path, device="cpu")
