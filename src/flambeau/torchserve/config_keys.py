"""Every key of config.properties: where its value goes, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass

from flambeau.config import values
from flambeau.config.values import Kind


@dataclass(frozen=True, slots=True)
class Key:
    """A key that sets one field of ServerConfig, or of a part of it."""

    place: str
    kind: Kind


_port = values.whole(at_most=65535)
_size = values.whole(at_least=1)
_seconds = values.scaled(1, "seconds")
_milliseconds = values.scaled(0.001, "milliseconds")

KEYS = {
    "inference_address": Key("inference", values.address(80, 443)),
    "management_address": Key("management", values.address(8081, 8444)),
    "metrics_address": Key("metrics", values.address(8082, 8445)),
    "grpc_inference_address": Key("grpc.inference.host", values.host),
    "grpc_management_address": Key("grpc.management.host", values.host),
    "grpc_inference_port": Key("grpc.inference.port", _port),
    "grpc_management_port": Key("grpc.management.port", _port),
    "grpc_inference_max_connection_age_ms": Key("grpc.inference_max_age_s", _milliseconds),
    "grpc_inference_max_connection_age_grace_ms": Key("grpc.inference_max_age_grace_s", _milliseconds),
    "grpc_management_max_connection_age_ms": Key("grpc.management_max_age_s", _milliseconds),
    "grpc_management_max_connection_age_grace_ms": Key("grpc.management_max_age_grace_s", _milliseconds),
    "enable_grpc_ssl": Key("grpc.is_tls", values.switch),
    "ts_open_inference_protocol": Key("open_inference", values.switch),
    "model_store": Key("model_store", values.path),
    "workflow_store": Key("workflow_store", values.path),
    "default_workers_per_model": Key("default_workers", values.whole()),
    "default_response_timeout": Key("default_response_timeout_s", _size),
    "default_startup_timeout": Key("default_startup_timeout_s", _size),
    "unregister_model_timeout": Key("unregister_timeout_s", values.whole()),
    "job_queue_size": Key("job_queue_size", _size),
    "number_of_gpu": Key("number_of_gpus", values.whole()),
    "default_service_handler": Key("default_handler", values.optional_text),
    "service_envelope": Key("service_envelope", values.text),
    "decode_input_request": Key("decode_input_request", values.switch),
    "limit_max_image_pixels": Key("limit_max_image_pixels", values.switch),
    "weights_only": Key("weights_only", values.switch),
    "max_request_size": Key("max_request_bytes", _size),
    "max_response_size": Key("max_response_bytes", _size),
    "install_py_dep_per_model": Key("install_dependencies", values.switch),
    "allowed_urls": Key("allowed_urls", values.patterns),
    "blacklist_env_vars": Key("hidden_env", values.pattern),
    "disable_token_authorization": Key("keys.is_on", values.opposite),
    "token_expiration_min": Key("keys.expiry_s", values.scaled(60, "minutes")),
    "enable_model_api": Key("model_api", values.switch),
    "metrics_config": Key("measure.file", values.path),
    "metrics_mode": Key("measure.mode", values.metrics_mode),
    "model_metrics_auto_detect": Key("measure.auto_detect", values.switch),
    "disable_system_metrics": Key("measure.system", values.opposite),
    "system_metrics_cmd": Key("measure.system_command", values.text),
    "metric_time_interval": Key("measure.interval_s", _size),
    "initial_worker_port": Key("first_worker_id", values.whole()),
    "initial_distribution_port": Key("first_distribution_port", _port),
    "ts_header_key_sequence_id": Key("sequence_headers.id", values.text),
    "ts_header_key_sequence_start": Key("sequence_headers.start", values.text),
    "ts_header_key_sequence_end": Key("sequence_headers.end", values.text),
    "private_key_file": Key("tls.private_key_file", values.path),
    "certificate_file": Key("tls.certificate_file", values.path),
    "keystore": Key("tls.keystore", values.path),
    "keystore_pass": Key("tls.keystore_pass", values.text),
    "keystore_type": Key("tls.keystore_type", values.text),
    # Ours: TorchServe had no word for these.
    "allow_unprotected": Key("allow_unprotected", values.switch),
    "allow_private_urls": Key("allow_private_urls", values.switch),
    "key_file": Key("keys.file", values.path),
    "ping_needs_key": Key("keys.ping_needs_key", values.switch),
    "error_details": Key("error_details", values.switch),
    "drain_timeout": Key("drain_timeout_s", _seconds),
    "keep_alive_timeout": Key("keep_alive_s", _seconds),
    "request_read_timeout": Key("request_read_timeout_s", _seconds),
}

CORS = {
    "cors_allowed_origin": "Access-Control-Allow-Origin",
    "cors_allowed_methods": "Access-Control-Allow-Methods",
    "cors_allowed_headers": "Access-Control-Allow-Headers",
}

# These say what is loaded, or how the rest is read.
STEERING = (
    "load_models",
    "models",
    "model_snapshot",
    "enable_metrics_api",
    "enable_envvars_config",
    "use_env_allowed_urls",
)

WITHOUT_EFFECT = {
    "vmargs": "there is no Java here",
    "plugins_path": "plugins are Java programs",
    "number_of_netty_threads": "one event loop serves all connections",
    "netty_client_threads": "one event loop serves all connections",
    "prefer_direct_buffer": "it tunes Java's network buffers",
    "use_native_io": "it tunes Java's network layer",
    "io_ratio": "it tunes Java's network layer",
    "async_logging": "a slow log never holds up requests for long",
    "cpp_log_config": "there is no C++ backend",
    "debug": "workers are always started by the server; `flambeau run` runs a handler under a debugger",
    "cpu_launcher_enable": "cores are shared out among workers by the server",
    "cpu_launcher_args": "cores are shared out among workers by the server",
    "ipex_enable": "handlers choose their own backend",
    "ipex_gpu_enable": "handlers choose their own backend",
    "model_server_home": "the server needs no home folder",
    "metrics_format": "Prometheus' format is the only one",
}

WRITTEN_BY_THE_SERVER = ("version", "python", "tsConfigFile")  # found in snapshots

_NOT_FROM_ENVIRONMENT = {
    "use_native_io",
    "io_ratio",
    "metric_time_interval",
    "enable_envvars_config",
    "model_snapshot",
    "models",
    "system_metrics_cmd",
    "use_env_allowed_urls",
    "vmargs",
    "plugins_path",
}
_SPECIAL_VARIABLES = {"token_expiration_min": "TS_TOKEN_EXPIRATION_TIME_MIN"}


def known_keys() -> tuple[str, ...]:
    """Every key that means something, or once did."""
    return (*KEYS, *CORS, *STEERING, *WITHOUT_EFFECT)


def variable_of(key: str) -> str | None:
    """The environment variable that may override a key; None: there is none."""
    if key in _NOT_FROM_ENVIRONMENT:
        return None
    plain = key.upper() if key.startswith("ts_") else f"TS_{key.upper()}"
    return _SPECIAL_VARIABLES.get(key, plain)
