"""Flags take precedence over variables, these over the file; what is wrong is named with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from flambeau.cli.serve import to_overrides
from flambeau.config.resolution import resolve, to_server_config, unknown_variables
from flambeau.config.server import Address
from flambeau.config.settings import LLM_SERVE, SERVE
from flambeau.errors import ConfigError


@pytest.fixture
def settings_of(tmp_path):
    """The settings of `flambeau serve` with this file, variables and flags."""

    def settings(text="", environment=None, table=SERVE, **flags):
        file = tmp_path / "f.yaml"
        file.write_text(text)
        return resolve(table, flags=flags, environment=environment or {}, file=file)

    return settings


def config_of(settings):
    return to_server_config(settings, SERVE)


def test_flag_beats_variable_beats_file_beats_default(settings_of):
    file, variables = "port: 1\nmax_gpus: 2\nworkers: 3\n", {"FLAMBEAU_PORT": "11", "FLAMBEAU_WORKERS": "13"}
    held = settings_of(file, variables, workers=23).held
    found = {name: (held[name].value, held[name].origin) for name in ("host", "max_gpus", "port", "workers")}
    assert found == {
        "host": ("127.0.0.1", "default"),
        "max_gpus": (2, "file"),
        "port": (11, "environment"),
        "workers": (23, "flag"),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nprot: 2\n", "line 2: prot is not a setting; did you mean port?"),
        ("max-request-size: 2\n", "line 1: max-request-size is not a setting; did you mean max_request_size?"),
        ("qqq: 2\n", "line 1: qqq is not a setting"),
        ("\n\nport: many\n", "line 3: port is 'many'; it must be a whole number from 0 to 65535"),
        ("watch: perhaps\n", "line 1: watch is 'perhaps'; it must be true or false"),
        ("host: 127\n", "line 1: host is 127; it must be text in one line (write it in quotes)"),
        ("name: no\n", "line 1: name is false; it must be text in one line (write it in quotes)"),
        ("allow_url: ['(']\n", "line 1: allow_url is ['(']; it must be a list, and each item a regular expression"),
        ("keystore_pass: [sesame]\n", "line 1: keystore_pass is '(hidden)'"),
        ("port: 1\nhost: a\nport: 2\n", "line 3: port is already in line 1; keep one of them"),
        ("dtype: float16\n", "line 1: dtype is not a setting of this command"),
        (
            "models:\n  - a.mar\n  - path: b.mar\n    wrokers: 2\n",
            "line 4: wrokers is not a setting of a model; did you",
        ),
        ("models:\n  - path: b.mar\n    workers: x\n", "line 3: workers is 'x'; it must be a whole number from 0"),
        ("models:\n  - a.mar\n  - {name: b}\n", "line 3: a model is a path, or a mapping with a path"),
        ("models: 3\n", "line 1: models is 3; it must be a list of paths, or of mappings with a path"),
        ("port=8080\n", "must hold settings, such as `port: 8080`, and not str"),
        ("port: [\n", "is not valid YAML"),
    ],
)
def test_mistake_in_the_file_is_named_with_its_line(settings_of, text, message):
    with pytest.raises(ConfigError) as error:
        settings_of(text)
    assert message in str(error.value)
    assert "f.yaml" in str(error.value)
    assert "sesame" not in str(error.value)


def test_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file"):
        resolve(SERVE, flags={}, environment={}, file=tmp_path / "none.yaml")


def test_key_without_a_value_and_an_empty_file_leave_the_defaults(settings_of):
    assert settings_of("port:\n")["port"] == 8080
    assert settings_of("")["port"] == 8080


def test_paths_in_the_file_are_relative_to_it(settings_of, tmp_path):
    (tmp_path / "m.mar").touch()
    settings = settings_of("model_store: store\nlog_folder: /logs\nmodels: [m.mar, org/name]\n")
    assert (settings["model_store"], settings["log_folder"]) == (tmp_path / "store", Path("/logs"))
    assert [entry.path for entry in settings["models"]] == [tmp_path / "m.mar", Path("org/name")]


def test_invalid_variable_is_named():
    with pytest.raises(ConfigError, match="FLAMBEAU_PORT is 'x'; it must be a whole number from 0 to 65535"):
        resolve(SERVE, flags={}, environment={"FLAMBEAU_PORT": "x"}, file=None)


def test_empty_variables_and_those_of_kubernetes_are_not_settings():
    environment = {"FLAMBEAU_HOST": "", "FLAMBEAU_PORT": "tcp://10.0.0.1:8080", "FLAMBEAU_PORT_8080_TCP_PORT": "8080"}
    settings = resolve(SERVE, flags={}, environment=environment, file=None)
    assert (settings["host"], settings["port"], settings.warnings) == ("127.0.0.1", 8080, [])


def test_misspelled_variable_is_a_warning():
    assert unknown_variables({"FLAMBEAU_MAX_REQEST_SIZE": "1", "FLAMBEAU_URL": "x", "FLAMBEAU_DTYPE": "float16"}) == [
        "FLAMBEAU_MAX_REQEST_SIZE is not a setting and has no effect; did you mean FLAMBEAU_MAX_REQUEST_SIZE?"
    ]


def test_certificate_turns_on_tls_at_every_port(settings_of):
    config = config_of(settings_of("certificate_file: c.pem\nprivate_key_file: k.pem\ngrpc_port: 7070\n"))
    assert all(address.is_tls for address in (config.inference, config.management, config.metrics))
    assert config.grpc.is_tls
    config = config_of(settings_of("keystore: s.p12\ngrpc_tls: false\nmetrics_address: http://127.0.0.1\n"))
    assert config.inference.is_tls
    assert not config.grpc.is_tls
    assert config.metrics == Address("127.0.0.1", 8082)


def test_address_replaces_host_and_port(settings_of):
    config = config_of(
        settings_of("inference_address: unix:/tmp/s\nmanagement_address: http://10.0.0.1:9000\nhost: h\n")
    )
    assert (config.inference.path, str(config.management)) == ("/tmp/s", "http://10.0.0.1:9000")
    assert config.metrics == Address("h", 8082)
    with pytest.raises(ConfigError, match=r"line 1 and --port both set the address of the inference API; remove one"):
        config_of(settings_of("inference_address: http://h:1\n", port=2))
    with pytest.raises(ConfigError, match=r"line 1: 'ftp://h' is not an address"):
        config_of(settings_of("inference_address: ftp://h\n"))


def test_port_0_turns_an_optional_api_off(settings_of):
    config = config_of(settings_of("metrics_port: 0\ngrpc_port: 0\ngrpc_management_port: 7\ngrpc_management_host: g\n"))
    assert (config.metrics, config.grpc.inference, config.grpc.management) == (None, None, Address("g", 7))


def test_cors_headers_and_nested_fields_are_set(settings_of):
    text = "cors_allowed_origin: '*'\nmetrics_interval: 5\nkey_file: k.json\nallow_host: [a, b]\nmax_gpus: 2\n"
    config = config_of(settings_of(text))
    assert config.cors == (
        ("Access-Control-Allow-Origin", "*"),
        ("Access-Control-Allow-Methods", "GET, POST, PUT, DELETE"),
        ("Access-Control-Allow-Headers", "Authorization, *"),
    )
    assert (config.measure.interval_s, config.allowed_hosts, config.number_of_gpus) == (5, ("a", "b"), 2)
    assert config.keys.file.name == "k.json"
    assert (config.names_json, config.suggests_names, config.measure.auto_detect) == (True, True, True)


def test_entry_of_a_model_yields_to_flags_only(settings_of):
    text = "workers: 2\nbatch_size: 4\nmodels:\n  - path: a\n    workers: 3\n    max_batch_delay: 50\n    name: n\n"
    settings = settings_of(text)
    [entry] = settings["models"]
    own = to_overrides(settings, entry.settings)
    assert {"min_workers": 3, "max_workers": 3, "batch_size": 4, "batch_delay_s": 0.05}.items() <= own.settings.items()
    assert (own.name, to_overrides(settings).settings["min_workers"]) == ("n", 2)
    settings = settings_of(text, workers=5)
    assert to_overrides(settings, entry.settings).settings["min_workers"] == 5


def test_defaults_of_a_model_are_below_its_own_settings(settings_of):
    config = config_of(settings_of("model_defaults:\n  cats:\n    workers: 2\n    batch_size: 4\n"))
    assert config.settings_of_model("cats", "2.0") == {"minWorkers": 2, "maxWorkers": 2, "batchSize": 4}
    assert config.settings_of_model("dogs", "1.0") == {}
    with pytest.raises(ConfigError, match=r"line 3: wrkers is not a setting of a model; did you mean workers\?"):
        settings_of("model_defaults:\n  cats:\n    wrkers: 2\n")
    with pytest.raises(ConfigError, match=r"FLAMBEAU_MODEL_DEFAULTS is '{'; it must be a mapping .* \(as JSON: "):
        settings_of("", {"FLAMBEAU_MODEL_DEFAULTS": "{"})


def test_llm_serve_reads_the_settings_of_the_engine(settings_of):
    settings = settings_of("dtype: float16\nport: 1\n", {"FLAMBEAU_DRAFT": "/d"}, LLM_SERVE, tensor_parallel=2)
    found = {name: settings[name] for name in ("dtype", "draft", "tensor_parallel", "port")}
    assert found == {"dtype": "float16", "draft": Path("/d"), "tensor_parallel": 2, "port": 1}
    with pytest.raises(ConfigError, match="models is not a setting of this command"):
        settings_of("models: [a]\n", {}, LLM_SERVE)
