from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flambeau.config.server import Address, GrpcConfig, KeysConfig, SequenceHeaders, ServerConfig, Tls, check_protection
from flambeau.errors import ConfigError
from flambeau.torchserve.config_keys import CORS, KEYS, WITHOUT_EFFECT, known_keys, variable_of
from flambeau.torchserve.config_properties import DEFAULT_URLS, TORCHSERVE, merge_settings, read_file, to_properties
from support.log_records import logged

LOGGER = "flambeau.torchserve.config_properties"


def server(**given: str) -> ServerConfig:
    return to_properties(given, TORCHSERVE, {}).server


# ---- values ----


def test_keys_become_settings(tmp_path):
    file = tmp_path / "config.properties"
    file.write_text(
        "inference_address=http://127.0.0.1:18080\nmanagement_address=http://0.0.0.0\nenable_metrics_api=false\n"
        "model_store=/models\njob_queue_size=1000\nmax_request_size=7\ndefault_workers_per_model=3\nload_models=a.mar\n"
    )
    properties = to_properties(read_file(file), ServerConfig())
    config = properties.server
    assert config.inference == Address("127.0.0.1", 18080)
    assert config.management == Address("0.0.0.0", 8081)
    assert config.metrics is None
    assert (config.model_store, config.job_queue_size, config.max_request_bytes) == (Path("/models"), 1000, 7)
    assert (config.default_workers, properties.load_models) == (3, "a.mar")


def test_addresses_have_ports_of_their_own_by_scheme():
    assert server(inference_address="http://0.0.0.0").inference.port == 80
    assert server(inference_address="https://0.0.0.0").inference == Address("0.0.0.0", 443, is_tls=True)
    assert server(management_address="https://h").management.port == 8444
    assert server(metrics_address="https://h").metrics == Address("h", 8445, is_tls=True)
    assert server(inference_address="unix:/tmp/s").inference.path == "/tmp/s"


def test_grpc_settings():
    assert not TORCHSERVE.names_json
    assert not TORCHSERVE.pages
    assert TORCHSERVE.grpc.inference == Address("127.0.0.1", 7070)
    config = server(
        grpc_inference_address="0.0.0.0",
        grpc_management_port="9999",
        enable_grpc_ssl="true",
        grpc_inference_max_connection_age_ms="1500",
        grpc_management_max_connection_age_grace_ms="250",
    ).grpc
    assert (config.inference, config.management) == (Address("0.0.0.0", 7070), Address("127.0.0.1", 9999))
    assert (config.is_tls, config.inference_max_age_s, config.management_max_age_grace_s) == (True, 1.5, 0.25)
    assert to_properties({"grpc_inference_port": "1"}, ServerConfig(), {}).server.grpc.inference == Address(port=1)


def test_the_rest_of_the_keys_reach_their_fields():
    config = server(
        token_expiration_min="1.5",
        key_file="/run/keys.json",
        ping_needs_key="false",
        metrics_needs_key="true",
        enable_model_api="TRUE",
        metrics_mode="prometheus",
        metrics_config="m.yaml",
        disable_system_metrics="true",
        model_metrics_auto_detect="true",
        metric_time_interval="5",
        system_metrics_cmd="x.py --y",
        ts_header_key_sequence_id="id",
        ts_header_key_sequence_start="start",
        ts_header_key_sequence_end="end",
        cors_allowed_origin="*",
        cors_allowed_methods="GET, POST",
        private_key_file="k.pem",
        certificate_file="c.pem",
        keystore="s.p12",
        keystore_pass="secret",
        allowed_urls="https://a/.*,file:///b/.*",
        allow_private_urls="true",
        install_py_dep_per_model="true",
        initial_distribution_port="30000",
        workflow_store="/w",
        ts_open_inference_protocol="true",
    )
    assert (config.keys.expiry_s, config.keys.file) == (90, Path("/run/keys.json"))
    assert (config.keys.ping_needs_key, config.keys.metrics_needs_key) == (False, True)
    assert config.model_api
    measure = config.measure
    assert (measure.mode, measure.file, measure.system, measure.auto_detect) == (
        "prometheus",
        Path("m.yaml"),
        False,
        True,
    )
    assert (measure.interval_s, measure.system_command) == (5, "x.py --y")
    assert config.sequence_headers == SequenceHeaders(id="id", start="start", end="end")
    assert config.cors == (("Access-Control-Allow-Origin", "*"), ("Access-Control-Allow-Methods", "GET, POST"))
    assert config.tls == Tls(
        private_key_file=Path("k.pem"), certificate_file=Path("c.pem"), keystore=Path("s.p12"), keystore_pass="secret"
    )
    assert config.allowed_urls == ("https://a/.*", "file:///b/.*")
    assert (config.allow_private_urls, config.install_dependencies, config.open_inference) == (True, True, True)
    assert (config.first_distribution_port, config.workflow_store) == (30000, Path("/w"))


def test_defaults_that_differ_from_our_own_command():
    config = server()
    assert (config.model_api, config.open_inference, config.measure.mode) == (False, True, "both")
    assert (config.allowed_urls, config.strict_calls) == (DEFAULT_URLS, False)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"management_address": "http://0.0.0.0:1"}, DEFAULT_URLS),  # behind its key
        ({"disable_token_authorization": "true"}, DEFAULT_URLS),  # on loopback
        ({"disable_token_authorization": "true", "management_address": "http://0.0.0.0:1"}, ()),
        ({"disable_token_authorization": "true", "grpc_management_address": "0.0.0.0"}, ()),
        ({"disable_token_authorization": "true", "inference_address": "http://0.0.0.0:1"}, DEFAULT_URLS),
        ({"allowed_urls": "https://a/.*"}, ("https://a/.*",)),
    ],
)
def test_urls_are_allowed_by_default_if_only_trusted_callers_can_register_models(given, allowed):
    assert server(**given).allowed_urls == allowed


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("job_queue_size", "many", "a whole number from 1 to 2147483647"),
        ("job_queue_size", "0", "a whole number from 1 to 2147483647"),
        ("grpc_inference_port", "70000", "a whole number from 0 to 65535"),
        ("token_expiration_min", "soon", "a number of minutes"),
        ("token_expiration_min", "nan", "a number of minutes"),
        ("blacklist_env_vars", "(", "a regular expression"),
        ("allowed_urls", "[", "a regular expression"),
        ("grpc_inference_address", "http://x", "a host"),
        ("model_store", "", "a path"),
        ("models", "{bad", "JSON"),
        ("models", '{"m": 1}', "a JSON object such as"),
    ],
)
def test_ill_typed_values_name_the_key_the_value_and_what_was_expected(key, value, expected):
    with pytest.raises(ConfigError) as error:
        server(**{key: value})
    assert str(error.value).startswith(f"{key} is {value!r}; it must be {expected}")


def test_ill_formed_address_names_its_key():
    with pytest.raises(ConfigError, match="inference_address: 'ftp://x' is not an address"):
        server(inference_address="ftp://x")


def test_switches_are_on_only_for_true_and_other_words_are_logged(caplog):
    assert server(enable_model_api="True").model_api
    assert not server(enable_model_api="yes").model_api
    assert logged(caplog, "flambeau.torchserve.config_values") == [("enable_model_api", "yes")]


def test_unknown_metrics_mode_is_an_error_in_the_log(caplog):
    assert server(metrics_mode="loud").measure.mode == "log"
    assert logged(caplog, "flambeau.torchserve.config_values", "ERROR") == [("metrics_mode", "loud")]


def test_unknown_keys_are_named_with_the_nearest_known_one(caplog):
    with caplog.at_level(logging.INFO):
        server(job_queue_sise="1", vmargs="-Xmx1g", something_else="x", version="0.12.0")
    misspelled, unknown = logged(caplog, LOGGER)
    assert misspelled[0] == "job_queue_sise"
    assert "job_queue_size" in misspelled[1]
    assert unknown == ("something_else", "")
    assert logged(caplog, LOGGER, "INFO") == [("vmargs", WITHOUT_EFFECT["vmargs"])]


def test_models_are_settings_by_name_and_version():
    assert server(models='{"m": {"1.0": {"batchSize": 4}}}').models == {"m": {"1.0": {"batchSize": 4}}}


def test_no_key_is_in_two_places():
    assert len(known_keys()) == len(set(known_keys()))
    assert not KEYS.keys() & (CORS.keys() | WITHOUT_EFFECT.keys())


# ---- precedence ----


def test_environment_counts_only_where_the_file_says_so(caplog):
    variables = {"TS_JOB_QUEUE_SIZE": "7", "OTHER": "x"}
    assert merge_settings({"job_queue_size": "5"}, {}, variables) == {"job_queue_size": "5"}
    file = {"job_queue_size": "5", "enable_envvars_config": "true"}
    assert merge_settings(file, {}, variables)["job_queue_size"] == "7"
    assert (
        merge_settings({"job_queue_size": "5"}, {"enable_envvars_config": "true"}, variables)["job_queue_size"] == "5"
    )


def test_environment_overrides_flags_and_flags_override_the_file():
    file = {"enable_envvars_config": "true", "model_store": "a", "load_models": "a"}
    given = merge_settings(file, {"model_store": "b", "load_models": "b"}, {"TS_MODEL_STORE": "c"})
    assert (given["model_store"], given["load_models"]) == ("c", "b")


@pytest.mark.parametrize(
    ("key", "variable"),
    [
        ("job_queue_size", "TS_JOB_QUEUE_SIZE"),
        ("token_expiration_min", "TS_TOKEN_EXPIRATION_TIME_MIN"),
        ("ts_header_key_sequence_id", "TS_HEADER_KEY_SEQUENCE_ID"),
        ("ts_open_inference_protocol", "TS_OPEN_INFERENCE_PROTOCOL"),
        ("models", None),
        ("model_snapshot", None),
        ("metric_time_interval", None),
        ("use_env_allowed_urls", None),
    ],
)
def test_variables_have_torchserves_names(key, variable):
    assert variable_of(key) == variable


def test_allowed_urls_need_a_permission_of_their_own():
    variables = {"TS_ALLOWED_URLS": ".*"}
    assert "allowed_urls" not in merge_settings({"enable_envvars_config": "true"}, {}, variables)
    both = {"enable_envvars_config": "true", "use_env_allowed_urls": "true"}
    assert merge_settings(both, {}, variables)["allowed_urls"] == ".*"


def test_misspelled_variables_are_named(caplog):
    merge_settings({"enable_envvars_config": "true"}, {}, {"TS_JOB_QUEUE_SISE": "1", "TS_UNRELATED_THING_OF_MINE": "1"})
    assert logged(caplog, LOGGER) == [("TS_JOB_QUEUE_SISE", "TS_JOB_QUEUE_SIZE")]


@pytest.mark.parametrize(("word", "is_on"), [("oip", True), ("true", False), ("", True)])
def test_open_inference_variable_decides_alone_when_it_is_not_empty(word, is_on):
    given = {"ts_open_inference_protocol": "true"}
    config = to_properties(given, TORCHSERVE, {"TS_OPEN_INFERENCE_PROTOCOL": word}).server
    assert config.open_inference is is_on


# ---- protection ----


def test_keys_are_on_unless_switched_off():
    assert server().needs_keys
    assert server(disable_token_authorization="false").needs_keys
    assert server(inference_address="http://0.0.0.0:1").needs_keys
    assert not server(disable_token_authorization="true").needs_keys
    assert not server(inference_address="http://0.0.0.0:1", disable_token_authorization="true").needs_keys


def test_asking_for_keys_in_the_environment_needs_no_permission():
    assert merge_settings({}, {}, {"TS_DISABLE_TOKEN_AUTHORIZATION": "false"}) == {
        "disable_token_authorization": "false"
    }
    assert merge_settings({}, {}, {"TS_DISABLE_TOKEN_AUTHORIZATION": "true"}) == {}


def test_public_bind_without_keys_must_be_allowed_explicitly(caplog):
    public = ServerConfig(grpc=GrpcConfig(inference=Address("0.0.0.0", 7070)), keys=KeysConfig(is_on=False))
    with pytest.raises(ConfigError, match=r"http://0\.0\.0\.0:7070 can be reached .*--allow-unprotected"):
        check_protection(public)
    check_protection(replace(public, allow_unprotected=True))
    assert logged(caplog, "flambeau.config.server") == [("http://0.0.0.0:7070",)]
    check_protection(server(inference_address="http://0.0.0.0:1", disable_token_authorization="true"))
    check_protection(server(inference_address="http://0.0.0.0:1"))
    check_protection(ServerConfig(keys=KeysConfig(is_on=False)))


# ---- bad input ----

ODD = st.sampled_from(
    [
        *(
            "abc",
            "-1",
            "1e3",
            "2000000000",
            "99999999999999999999999",
            "9" * 5000,
            "a\0b",
            "\udcff",
            "",
            " ",
            "1.5",
            "nan",
        ),
        *(
            "inf",
            "1e308",
            "http://[::",
            "http://:99999",
            "unix:",
            "unix:a\0b",
            "[",
            "(?P<",
            "{}",
            '{"a":1}',
            "\r\nx: y",
        ),
        *('{"a":' * 3000, '{"a":{"1.0":{"minWorkers":2000000000,"batchSize":[]}}}', "x" * 5000, "é", "true", "$$X$$"),
    ]
)


@given(key=st.sampled_from(known_keys()), value=ODD | st.text(max_size=20))
def test_any_value_of_a_key_is_read_or_rejected_in_one_line(key, value):
    try:
        to_properties({key: value}, TORCHSERVE, {})
    except ConfigError as error:
        assert key in str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
        assert len(str(error)) < 400  # noqa: PT017


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("default_workers_per_model", "2000000000"),
        ("job_queue_size", "99999999999"),
        ("drain_timeout", "1e308"),
        ("grpc_inference_max_connection_age_ms", "999999999999"),
        ("cors_allowed_origin", "a\r\nb: c"),
        ("ts_header_key_sequence_id", "a b"),
        ("model_store", "a\0b"),
        ("service_envelope", "a\0b"),
        ("grpc_inference_address", "a b"),
    ],
)
def test_values_that_would_fail_later_are_rejected_at_start(key, value):
    with pytest.raises(ConfigError, match=f"^{key} is .*; it must be "):
        server(**{key: value})
