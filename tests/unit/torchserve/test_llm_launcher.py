"""What the flags of `python -m ts.llm_launcher` become."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from flambeau.torchserve.llm_launcher import LaunchFlags, model_folder, parse, to_model_config


def test_defaults_are_torchserves():
    flags = parse([])
    assert flags == LaunchFlags(model_id="meta-llama/Meta-Llama-3.1-8B-Instruct")
    assert to_model_config(flags, 2) == {
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 1,
        "maxBatchDelay": 100,
        "responseTimeout": 1200,
        "startupTimeout": 1200,
        "deviceType": "gpu",
        "asyncCommunication": True,
        "parallelType": "tp",
        "parallelLevel": 2,
        "handler": {
            "model_path": "meta-llama/Meta-Llama-3.1-8B-Instruct",
            "dtype": "bfloat16",
            "tensor_parallel_size": 2,
            "max_num_seqs": 256,
        },
    }


def test_every_flag_is_read():
    words = "--model_name m --model_store s --model_id i --disable_token_auth --startup_timeout 7 --dtype float16"
    words += " --vllm_engine.max_num_seqs 8 --vllm_engine.max_model_len 9 --vllm_engine.download_dir d"
    words += " --trt_llm_engine.max_batch_size 5 --trt_llm_engine.kv_cache_free_gpu_memory_fraction 0.25"
    flags = parse(words.split())
    assert (flags.model_store, flags.disable_token_auth) == (Path("s"), True)
    handler = {"model_path": "i", "dtype": "float16", "tensor_parallel_size": 1}
    config = to_model_config(flags, 1)
    assert config["startupTimeout"] == 7
    theirs = {"max_num_seqs": 8, "max_model_len": 9, "download_dir": str(Path("d").resolve())}
    assert config["handler"] == {**handler, **theirs}
    tensorrt = to_model_config(replace(flags, engine="trt_llm"), 1)
    assert tensorrt["handler"] == {**handler, "max_num_seqs": 5, "kv_cache_fraction": 0.25}


def test_a_host_without_gpus_is_served_on_its_cpu():
    config = to_model_config(parse([]), 0)
    handler = config["handler"]
    assert (config["deviceType"], handler["tensor_parallel_size"], handler["dtype"]) == ("cpu", 1, "auto")
    assert "parallelType" not in config


def test_a_folder_is_named_by_its_full_path(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    config = to_model_config(parse(["--model_id", "here", "--dtype", "float16"]), 0)
    assert (config["handler"]["model_path"], config["handler"]["dtype"]) == (str(tmp_path / "here"), "float16")


def test_an_unknown_engine_is_rejected():
    with pytest.raises(RuntimeError, match="Unsupported LLM Engine: 'other' is none of vllm, trt_llm"):
        to_model_config(parse(["--engine", "other"]), 0)


def test_the_folder_is_removed_at_the_end_unless_it_was_there(tmp_path):
    flags = LaunchFlags(model_id="i", model_store=tmp_path / "new" / "store")
    with model_folder(flags, 0) as folder:
        manifest = json.loads((folder / "MAR-INF" / "MANIFEST.json").read_text())
        expected = {"modelName": "model", "handler": "gpt_handler", "modelVersion": "1.0"}
        assert manifest["model"] == {**expected, "configFile": "model-config.yaml"}
        assert yaml.safe_load((folder / "model-config.yaml").read_text()) == to_model_config(flags, 0)
    assert [*flags.model_store.iterdir()] == []
    (flags.model_store / "model").mkdir()
    with model_folder(flags, 0) as folder:
        assert [*folder.iterdir()] == []
    assert folder.is_dir()
