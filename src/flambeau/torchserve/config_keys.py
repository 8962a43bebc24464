"""Every key of config.properties: the field it sets and the reader of its value."""

from __future__ import annotations

from dataclasses import dataclass

from flambeau.config.model import MAX_WORKERS
from flambeau.config.server import check_pattern
from flambeau.torchserve import config_values as values
from flambeau.torchserve.config_values import Reader


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """A key that sets one field of ServerConfig, or a nested field such as `grpc.inference.port`."""

    field_path: str
    read: Reader


_port = values.whole(at_most=65535)
_size = values.whole(at_least=1)
_seconds = values.scaled(1, "seconds")
_milliseconds = values.scaled(0.001, "milliseconds")

KEYS = {
    "inference_address": ConfigKey("inference", values.address(80, 443)),
    "management_address": ConfigKey("management", values.address(8081, 8444)),
    "metrics_address": ConfigKey("metrics", values.address(8082, 8445)),
    "grpc_inference_address": ConfigKey("grpc.inference.host", values.host),
    "grpc_management_address": ConfigKey("grpc.management.host", values.host),
    "grpc_inference_port": ConfigKey("grpc.inference.port", _port),
    "grpc_management_port": ConfigKey("grpc.management.port", _port),
    "grpc_inference_max_connection_age_ms": ConfigKey("grpc.inference_max_age_s", _milliseconds),
    "grpc_inference_max_connection_age_grace_ms": ConfigKey("grpc.inference_max_age_grace_s", _milliseconds),
    "grpc_management_max_connection_age_ms": ConfigKey("grpc.management_max_age_s", _milliseconds),
    "grpc_management_max_connection_age_grace_ms": ConfigKey("grpc.management_max_age_grace_s", _milliseconds),
    "enable_grpc_ssl": ConfigKey("grpc.is_tls", values.switch),
    "ts_open_inference_protocol": ConfigKey("open_inference", values.switch),
    "model_store": ConfigKey("model_store", values.path),
    "workflow_store": ConfigKey("workflow_store", values.path),
    "default_workers_per_model": ConfigKey("default_workers", values.whole(at_most=MAX_WORKERS)),
    "default_response_timeout": ConfigKey("default_response_timeout_s", _size),
    "default_startup_timeout": ConfigKey("default_startup_timeout_s", _size),
    "unregister_model_timeout": ConfigKey("unregister_timeout_s", values.whole()),
    "job_queue_size": ConfigKey("job_queue_size", _size),
    "number_of_gpu": ConfigKey("number_of_gpus", values.whole()),
    "default_service_handler": ConfigKey("default_handler", values.optional_text),
    "service_envelope": ConfigKey("service_envelope", values.text),
    "decode_input_request": ConfigKey("decode_input_request", values.switch),
    "limit_max_image_pixels": ConfigKey("limit_max_image_pixels", values.switch),
    "weights_only": ConfigKey("weights_only", values.switch),
    "max_request_size": ConfigKey("max_request_bytes", _size),
    "max_response_size": ConfigKey("max_response_bytes", _size),
    "install_py_dep_per_model": ConfigKey("install_dependencies", values.switch),
    "allowed_urls": ConfigKey("allowed_urls", values.patterns),
    "blacklist_env_vars": ConfigKey("hidden_env", check_pattern),
    "disable_token_authorization": ConfigKey("keys.is_on", values.opposite),
    "token_expiration_min": ConfigKey("keys.expiry_s", values.scaled(60, "minutes")),
    "enable_model_api": ConfigKey("model_api", values.switch),
    "metrics_config": ConfigKey("measure.file", values.path),
    "metrics_mode": ConfigKey("measure.mode", values.metrics_mode),
    "model_metrics_auto_detect": ConfigKey("measure.auto_detect", values.switch),
    "disable_system_metrics": ConfigKey("measure.system", values.opposite),
    "system_metrics_cmd": ConfigKey("measure.system_command", values.text),
    "metric_time_interval": ConfigKey("measure.interval_s", _size),
    "initial_worker_port": ConfigKey("first_worker_id", values.whole()),
    "initial_distribution_port": ConfigKey("first_distribution_port", _port),
    "ts_header_key_sequence_id": ConfigKey("sequence_headers.id", values.header_name),
    "ts_header_key_sequence_start": ConfigKey("sequence_headers.start", values.header_name),
    "ts_header_key_sequence_end": ConfigKey("sequence_headers.end", values.header_name),
    "private_key_file": ConfigKey("tls.private_key_file", values.path),
    "certificate_file": ConfigKey("tls.certificate_file", values.path),
    "keystore": ConfigKey("tls.keystore", values.path),
    "keystore_pass": ConfigKey("tls.keystore_pass", values.text),
    "keystore_type": ConfigKey("tls.keystore_type", values.text),
    "client_ca_file": ConfigKey("tls.client_ca_file", values.path),
    # Not in TorchServe.
    "allow_unprotected": ConfigKey("allow_unprotected", values.switch),
    "allowed_hosts": ConfigKey("allowed_hosts", values.names),
    "strict_calls": ConfigKey("strict_calls", values.switch),
    "allow_private_urls": ConfigKey("allow_private_urls", values.switch),
    "min_download_rate": ConfigKey("min_download_rate", values.whole()),
    "allow_missing": ConfigKey("allow_missing", values.switch),
    "ignore_shared_pins": ConfigKey("ignore_shared_pins", values.switch),
    "key_file": ConfigKey("keys.file", values.path),
    "safe_weights": ConfigKey("safe_weights", values.switch),
    "ping_needs_key": ConfigKey("keys.ping_needs_key", values.switch),
    "metrics_needs_key": ConfigKey("keys.metrics_needs_key", values.switch),
    "error_details": ConfigKey("error_details", values.switch),
    "max_workers_per_model": ConfigKey("max_workers_per_model", values.whole(at_least=1)),
    "drain_timeout": ConfigKey("drain_timeout_s", _seconds),
    "idempotency_cache_mb": ConfigKey("idempotency_cache_mb", values.whole()),
    "idempotency_cache_s": ConfigKey("idempotency_cache_s", _seconds),
    "keep_alive_timeout": ConfigKey("keep_alive_s", _seconds),
    "request_read_timeout": ConfigKey("request_read_timeout_s", _seconds),
    "max_connections_per_address": ConfigKey("max_connections_per_address", values.whole()),
    "response_read_timeout": ConfigKey("response_read_timeout_s", _seconds),
    "crash_folder": ConfigKey("crash_folder", values.path),
    "crash_bundles": ConfigKey("crash_bundles", values.whole()),
    "crash_payloads": ConfigKey("crash_payloads", values.switch),
}

CORS = {
    "cors_allowed_origin": "Access-Control-Allow-Origin",
    "cors_allowed_methods": "Access-Control-Allow-Methods",
    "cors_allowed_headers": "Access-Control-Allow-Headers",
}

# Keys that select the models, or control how the other keys are read.
CONTROL_KEYS = (
    "load_models",
    "models",
    "model_snapshot",
    "enable_metrics_api",
    "enable_envvars_config",
    "use_env_allowed_urls",
)

WITHOUT_EFFECT = {
    "vmargs": "this server does not run on Java",
    "plugins_path": "plugins are Java programs",
    "number_of_netty_threads": "one event loop serves all connections",
    "netty_client_threads": "one event loop serves all connections",
    "prefer_direct_buffer": "it tunes Java's network buffers",
    "use_native_io": "it tunes Java's network layer",
    "io_ratio": "it tunes Java's network layer",
    "async_logging": "logs are always written by a thread of their own",
    "cpp_log_config": "there is no C++ backend",
    "debug": "workers are always started by the server; `flambeau run` runs a handler under a debugger",
    "cpu_launcher_enable": "the server divides the cores among its workers",
    "cpu_launcher_args": "the server divides the cores among its workers",
    "ipex_enable": "the handler selects its backend",
    "ipex_gpu_enable": "the handler selects its backend",
    "model_server_home": "the server needs no home folder",
    "metrics_format": "metrics are always in Prometheus format",
}

SNAPSHOT_KEYS = ("version", "python", "tsConfigFile")  # found in snapshots

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
    """Every key that is accepted, including those without effect."""
    return (*KEYS, *CORS, *CONTROL_KEYS, *WITHOUT_EFFECT)


def variable_of(key: str) -> str | None:
    """The environment variable that overrides a key; None if there is none."""
    if key in _NOT_FROM_ENVIRONMENT:
        return None
    plain = key.upper() if key.startswith("ts_") else f"TS_{key.upper()}"
    return _SPECIAL_VARIABLES.get(key, plain)
