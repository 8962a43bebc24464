"""The path of a checkpoint is checked before anything starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flambeau.cli.main import app, app_with, name_numbers
from flambeau.cli.options import check_checkpoint, management_beside
from flambeau.cli.serve import ModelOverrides, find_models
from flambeau.config.settings import SERVE
from flambeau.errors import ConfigError


def test_folder_without_weights_is_not_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no weights"):
        check_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").touch()
    check_checkpoint(tmp_path)


def test_file_without_weights_is_not_a_checkpoint(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"--draft .*notes.txt is not a checkpoint"):
        check_checkpoint(tmp_path / "notes.txt", "--draft")


def test_a_gguf_file_and_an_adapter_are_called_what_they_are(tmp_path):
    (tmp_path / "small.gguf").touch()
    for path in (tmp_path / "small.gguf", tmp_path):
        check_checkpoint(path)
        with pytest.raises(ConfigError, match=r"small\.gguf is a GGUF file.*flambeau llm serve"):
            list(find_models(path, ModelOverrides()))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").touch()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    with pytest.raises(ConfigError, match=r"adapter of some/base .*lora_adapters"):
        check_checkpoint(adapter)
    with pytest.raises(ConfigError, match=r"adapter of some/base .*lora_adapters"):
        list(find_models(adapter, ModelOverrides()))


@pytest.mark.parametrize(
    ("file", "text"),
    [("model-config.yaml", "handler: {name: gpt_handler, model_path: small.gguf}"), ("handler.py", "class Own: ...")],
)
def test_a_gguf_file_beside_its_handler_is_served(tmp_path, file, text):
    (tmp_path / "small.gguf").touch()
    (tmp_path / file).write_text(text)
    [model] = find_models(tmp_path, ModelOverrides(name="small"))
    assert (model.name, model.path) == ("small", tmp_path)


def test_name_of_the_hub_gets_the_download_command():
    with pytest.raises(ConfigError, match="hf download someone/some-model --local-dir some-model"):
        check_checkpoint(Path("someone/some-model"))
    with pytest.raises(ConfigError, match=r"folder or file$"):
        check_checkpoint(Path("/no/such/folder"))


def test_path_in_an_existing_folder_is_not_a_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ConfigError, match=r"folder or file$"):
        check_checkpoint(Path("models/lama"))


def help_of(*words):
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("words", [("serve",), ("llm", "serve"), ("serv",), ()])
def test_command_alone_says_what_it_says_among_all(words):
    alone, among_all = (
        CliRunner().invoke(each, [*words, "--help"]) for each in (app_with(words[0] if words else ""), app)
    )
    assert (alone.exit_code, alone.output) == (among_all.exit_code, among_all.output)


def test_only_the_command_that_runs_is_built():
    assert [each.callback.__name__ for each in app_with("serve").registered_commands] == ["serve"]
    assert app_with("serve").registered_groups == []
    assert [each.name for each in app_with("llm").registered_groups] == ["llm"]
    assert app_with("--help") is app


@pytest.mark.parametrize("words", [("serve",), ("run",), ("archive", "pack"), ("llm", "serve")])
def test_help_has_no_types_of_python(words):
    assert "list[" not in help_of(*words)


def test_both_commands_that_serve_can_be_opened_without_keys():
    for words in (("serve",), ("llm", "serve")):
        assert "--allow-unprotected" in help_of(*words)


def test_help_shows_the_basic_settings_by_group_and_help_all_every_one():
    basic, everything = (CliRunner().invoke(app, ["serve", word]).output for word in ("--help", "--help-all"))
    groups = [line.removesuffix(":") for line in everything.splitlines() if line.endswith(":") and line[0] != " "]
    assert groups == ["Options", *dict.fromkeys(setting.group for setting in SERVE)]
    for setting in (one for one in SERVE if not one.is_argument):
        shown = re.compile(rf"^  {setting.flag}(?![\w-])", re.MULTILINE)
        assert shown.search(everything), setting.flag
        assert bool(shown.search(basic)) == setting.is_basic, setting.flag


def test_help_of_the_command_loads_no_settings():
    program = (
        "import sys, flambeau.cli.main as main\n"
        "sys.argv = ['flambeau', '--help']\n"
        "try: main.main()\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('flambeau.config.settings', 'yaml', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("inference", "management"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8081"),
        ("https://[::1]:8443/", "https://[::1]:8444"),
        ("https://models.example.com", "https://models.example.com"),
    ],
)
def test_management_api_is_beside_the_inference_api(inference, management):
    assert management_beside(inference) == management


def test_error_quotes_the_value():
    words = [sys.executable, "-m", "flambeau.cli.main", "serve", "--log-level", "loud"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "'loud' is not one of debug, info, warning, error" in result.stderr


@pytest.mark.parametrize("words", [[], ["models"], ["archive"], ["llm"], ["keys"], ["cluster"], ["config"]])
def test_help_shows_whole_sentences_for_its_commands(words):
    shown = CliRunner().invoke(app, [*words, "--help"], terminal_width=80).output
    assert [line for line in shown.splitlines()[1:] if line.endswith("...")] == []


def test_errors_call_a_number_so():
    name_numbers()
    assert "'abc' is not a valid whole number." in CliRunner().invoke(app, ["slow", "--limit", "abc"]).output


def test_other_names_of_commands_work_and_are_not_listed():
    shown = CliRunner().invoke(app, ["models", "--help"]).output
    for name in ("list", "unregister"):
        assert CliRunner().invoke(app, ["models", name, "--help"]).exit_code == 0
        assert f"  {name} " not in shown
