"""`flambeau llm serve` checks its options and writes a model folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from flambeau.cli import llm_serve
from flambeau.cli.llm_serve import LlmServeFlags, check_flags, read_adapters, to_model_config
from flambeau.cli.serve import ModelOverrides
from flambeau.config.server import ServerConfig
from flambeau.errors import ConfigError


@pytest.mark.parametrize("named", ["ok", "ok/config.json", "ok/model.safetensors"])
def test_model_has_the_name_of_its_folder(tmp_path, monkeypatch, named):
    (tmp_path / "ok").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "ok" / file).touch()
    served = []
    monkeypatch.setattr(llm_serve, "serve_paths", lambda config, models, *others, **options: served.extend(models))
    flags = LlmServeFlags(model_path=tmp_path / named)
    llm_serve.serve(ServerConfig(), flags, ModelOverrides(), ranks=1, log_level="INFO")
    assert [path.name for path, _ in served] == ["ok"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"draft_model_path": Path("/no/draft")}, "--draft /no/draft does not exist"),
        ({"tokenizer_path": Path("/no/tokenizer")}, "--tokenizer /no/tokenizer does not exist"),
    ],
)
def test_invalid_flags_are_rejected(flags, reason):
    with pytest.raises(ConfigError, match=reason):
        check_flags(LlmServeFlags(model_path=Path(), **flags))


def test_adapters_are_names_and_folders(tmp_path):
    assert read_adapters([]) is None
    assert read_adapters([f"a={tmp_path}", f"b={tmp_path}"]) == {"a": str(tmp_path), "b": str(tmp_path)}
    for wrong, reason in (
        (["a"], "must be NAME=FOLDER"),
        ([f"={tmp_path}"], "must be NAME=FOLDER"),
        (["a=/no/folder"], "there is no folder /no/folder"),
        ([f"a={tmp_path}", f"a={tmp_path}"], "two adapters"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read_adapters(wrong)


def test_flags_become_a_model_config():
    config = to_model_config(LlmServeFlags(model_path=Path("/m"), draft_model_path=Path("/d"), dtype="float16"), 2)
    assert config["handler"] == {
        "model_path": "/m",
        "draft_model_path": "/d",
        "dtype": "float16",
        "speculative": True,
    }
    assert config["torchrun"] == {"nproc-per-node": 2}
