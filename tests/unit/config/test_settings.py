"""The table of settings is complete, and every setting can be set by flag, variable and file."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flambeau.cli.main import app
from flambeau.config.resolution import OTHER_VARIABLES, resolve
from flambeau.config.server import SECRET_VARIABLES, ServerConfig
from flambeau.config.settings import DEFAULTS, EVERY, LLM_SERVE, SERVE, SERVER_SETTINGS
from flambeau.config.value_types import (
    Choice,
    ClusterManager,
    FilePath,
    ModelDefaults,
    ModelEntry,
    ModelList,
    Number,
    Several,
    Switch,
    Whole,
)
from flambeau.torchserve.config_keys import CONTROL_KEYS, CORS, KEYS

FIELDS = {setting.field for setting in EVERY}
# Keys of config.properties whose fields several settings make.
ADDRESSES = {
    "inference": "inference_address",
    "management": "management_address",
    "metrics": "metrics_address",
    "grpc.inference.host": "grpc_host",
    "grpc.inference.port": "grpc_port",
    "grpc.management.host": "grpc_management_host",
    "grpc.management.port": "grpc_management_port",
    "grpc.is_tls": "grpc_tls",
}
NAMES = {setting.name for setting in SERVE}


@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_config_properties_has_a_setting(key):
    path = KEYS[key].field_path
    assert path in FIELDS or ADDRESSES[path] in NAMES


def test_other_keys_of_config_properties_have_one_too_or_need_none():
    assert {*CORS} <= NAMES
    # metrics_port 0 disables the metrics API; variables are always read; snapshots belong to the other command.
    assert {*CONTROL_KEYS} - {"load_models", "models"} == {
        "enable_metrics_api",
        "enable_envvars_config",
        "use_env_allowed_urls",
        "model_snapshot",
    }
    assert "models" in NAMES


def leaves(config, prefix=""):
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def test_every_field_of_the_server_has_a_setting():
    reached = {*FIELDS, *ADDRESSES}
    native = {field.name for field in fields(ServerConfig) if getattr(DEFAULTS, field.name) != field.default}
    ours = {*native, "grpc.is_optional", "server_name", "files_from_urls"}  # the commands decide
    missing = {path for path in leaves(ServerConfig()) if path not in reached} - ours
    assert {path for path in missing if path.split(".")[0] not in ("inference", "management", "metrics")} == {
        "grpc.inference",
        "grpc.management",
    }


def test_names_are_unique_and_leave_the_variables_of_others_alone():
    assert len({setting.name for setting in EVERY}) == len(EVERY)
    flags = [flag for setting in EVERY for flag in (setting.flag, setting.off_flag)]
    assert len({*flags}) == len(flags)
    assert not {setting.variable for setting in EVERY} & {*OTHER_VARIABLES}


def test_llm_serve_has_every_setting_of_serve_but_the_models():
    assert {setting.name for setting in SERVE} - {setting.name for setting in LLM_SERVE} == {"models", "handler"}


def test_secrets_are_masked_and_workers_do_not_inherit_them():
    secrets = {setting for setting in EVERY if "pass" in setting.name or "secret" in setting.name}
    assert secrets
    assert all(setting.is_secret and setting.variable in SECRET_VARIABLES for setting in secrets)


@pytest.mark.parametrize("setting", [one for one in EVERY if one.default is not None and not one.is_secret], ids=str)
def test_default_is_a_value_of_its_type(setting):
    assert setting.type.read(setting.show(setting.default)) == setting.default


def sample(setting):
    """A value other than the default, as text."""
    kind = setting.type.item if isinstance(setting.type, Several) else setting.type
    if isinstance(kind, Switch):
        return "false" if setting.default else "true"
    if isinstance(kind, Whole):
        return str(min(kind.at_most, max(kind.at_least, 3)))
    if isinstance(kind, Number):
        return "2.5" if kind.at_most >= 2.5 else "0.5"
    if isinstance(kind, Choice):
        return kind.words[-1]
    if isinstance(kind, ModelDefaults):
        return '{"m": {"workers": 2}}'
    if isinstance(kind, ClusterManager):
        return "ray=head:6379"
    if setting.name == "worker_address":
        return "10.0.0.1:7000"
    return "/some/path" if isinstance(kind, FilePath | ModelList) else "some"


@pytest.mark.parametrize("setting", EVERY, ids=lambda setting: setting.name)
def test_setting_is_read_from_a_variable_and_from_a_file(setting, tmp_path):
    text = sample(setting)
    expected = setting.type.read(text)
    held = resolve([setting], flags={}, environment={setting.variable: text}, file=None).held[setting.name]
    assert (held.value, held.origin, held.source) == (expected, "environment", setting.variable)
    file = tmp_path / "f.yaml"
    value = [text] if isinstance(setting.type, Several | ModelList) else text
    file.write_text(f"# settings\n{setting.name}: {json.dumps(value)}\n")
    held = resolve([setting], flags={}, environment={}, file=file).held[setting.name]
    assert (held.value, held.origin, held.source) == (expected, "file", f"{file}, line 2")


def test_every_flag_is_read(monkeypatch):
    taken = ("inference_address", "management_address", "metrics_address")  # instead of host and port
    settings = [one for one in SERVE if not one.is_argument and one.name not in taken]
    words = ["model.mar"]
    for setting in settings:
        text = sample(setting)
        if isinstance(setting.type, Switch):
            words.append(setting.flag if text == "true" else setting.off_flag)
        else:
            words += [setting.flag, text]
    result = CliRunner().invoke(app, ["config", "show", "--json", "--changed", *words])
    assert result.exit_code == 0, result.output
    shown = {row["setting"]: row for row in json.loads(result.output)}
    assert {*shown} == {"models", *(setting.name for setting in settings)}
    assert {row["origin"] for row in shown.values()} == {"flag"}
    for setting in settings:
        assert shown[setting.name]["value"] == setting.show(setting.type.read(sample(setting))), setting.name


def test_defaults_are_those_of_a_native_server():
    assert DEFAULTS.model_api
    assert resolve(SERVE, flags={}, environment={}, file=None)["models"] is None
    assert ModelEntry(Path("m")).settings == {}
    assert all(setting.group for setting in (*SERVER_SETTINGS, *LLM_SERVE))
