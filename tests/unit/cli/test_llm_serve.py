"""`flambeau llm serve` checks its options and writes a model folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flambeau.cli import llm_serve
from flambeau.cli.llm_serve import LlmServeFlags, check_flags, read_adapters, to_model_config, write_model
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


@pytest.mark.parametrize("named", ["", "model.safetensors"])
def test_a_model_config_that_is_not_read_is_named_in_a_warning(tmp_path, monkeypatch, named):
    for file in ("config.json", "model.safetensors", "model-config.yaml"):
        (tmp_path / file).touch()
    given = []
    monkeypatch.setattr(llm_serve, "serve_paths", lambda *others, warnings, **options: given.extend(warnings))
    flags = LlmServeFlags(model_path=tmp_path / named)
    llm_serve.serve(ServerConfig(), flags, ModelOverrides(), ranks=1, log_level="INFO", warnings=["first"])
    assert given == [
        "first",
        f"{tmp_path}/model-config.yaml has no effect: llm serve takes flags only; "
        f"for its settings use flambeau serve {tmp_path}",
    ]


def test_a_model_of_embeddings_or_scores_is_named_in_a_warning(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}')
    (tmp_path / "model.safetensors").touch()
    given = []
    monkeypatch.setattr(llm_serve, "serve_paths", lambda *others, warnings, **options: given.append(warnings))
    for document in (None, '[{"type": "sentence_transformers.models.Transformer"}]'):
        if document:
            (tmp_path / "modules.json").write_text(document)
        flags = LlmServeFlags(model_path=tmp_path)
        llm_serve.serve(ServerConfig(), flags, ModelOverrides(), ranks=1, log_level="INFO")
    assert not given[0]
    assert len(given[1]) == 1
    assert f"flambeau serve {tmp_path}" in given[1][0]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"draft_model_path": Path("/no/draft")}, "--draft /no/draft does not exist"),
        ({"draft_model_path": Path("/d"), "speculative": "mtp"}, "--speculative mtp needs no draft; leave out --draft"),
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


@pytest.mark.parametrize(("given", "written"), [("lookup", True), ("mtp", "mtp")])
def test_speculation_without_a_draft(given, written):
    config = to_model_config(LlmServeFlags(model_path=Path("/m"), speculative=given), 1)
    assert config["handler"] == {"model_path": "/m", "speculative": written}


def test_flags_become_a_model_config():
    config = to_model_config(LlmServeFlags(model_path=Path("/m"), draft_model_path=Path("/d"), dtype="float16"), 2)
    assert config["handler"] == {
        "model_path": "/m",
        "draft_model_path": "/d",
        "dtype": "float16",
        "speculative": True,
    }
    assert config["torchrun"] == {"nproc-per-node": 2}


def test_model_for_a_cluster_has_its_files_in_its_folder(tmp_path):
    """Machines of a cluster get the files of the folder."""
    for name in ("ok", "draft", "sql"):
        (tmp_path / name).mkdir()
    for name in ("ok/config.json", "ok/model.pth", "tokenizer.json", "tokenizer_config.json", "private.txt"):
        (tmp_path / name).write_text(name)
    flags = LlmServeFlags(
        model_path=tmp_path / "ok" / "model.pth",
        draft_model_path=tmp_path / "draft",
        tokenizer_path=tmp_path / "tokenizer.json",
        lora_adapters={"sql": str(tmp_path / "sql")},
    )
    (tmp_path / "made").mkdir()
    folder = write_model(tmp_path / "made", "m", to_model_config(flags, 1), has_links=True)
    handler = yaml.safe_load((folder / "model-config.yaml").read_text())["handler"]
    assert (folder / handler["model_path"]).read_text() == "ok/model.pth"
    assert (folder / handler["model_path"]).with_name("config.json").is_file()
    assert (folder / handler["draft_model_path"]).resolve() == tmp_path / "draft"
    assert (folder / handler["tokenizer_path"]).read_text() == "tokenizer.json"
    beside = (folder / handler["tokenizer_path"]).parent
    assert sorted(path.name for path in beside.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert (folder / handler["lora_adapters"]["sql"]).resolve() == tmp_path / "sql"
    assert not [value for value in handler.values() if str(value).startswith("/")]


def test_gguf_file_for_a_cluster_is_linked_alone(tmp_path):
    (tmp_path / "m.gguf").write_text("weights")
    (tmp_path / "made").mkdir()
    flags = LlmServeFlags(model_path=tmp_path / "m.gguf")
    folder = write_model(tmp_path / "made", "m", to_model_config(flags, 1), has_links=True)
    handler = yaml.safe_load((folder / "model-config.yaml").read_text())["handler"]
    assert handler["model_path"] == "checkpoint.gguf"
    assert (folder / "checkpoint.gguf").read_text() == "weights"


def test_help_keeps_the_names_of_what_it_takes():
    import typer

    from flambeau.cli.llm_commands import llm_app

    commands = typer.main.get_command(llm_app).commands
    helps = {(name, option.name): option.help or "" for name in commands for option in commands[name].params}
    assert helps["bench", "draft"].startswith("For a checkpoint: smaller checkpoint, or head (EAGLE")
    assert "GGUF file" in helps["serve", "checkpoint"]
