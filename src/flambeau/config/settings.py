"""The settings of `flambeau serve` and `flambeau llm serve`: one table for flags, variables, files and documents.

A new setting is one entry of a group. Its key in a configuration file is its name, its flag `--the-name`, its variable
FLAMBEAU_THE_NAME. `field` says where ServerConfig holds it, and its default is taken from there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flambeau.config.model import MAX_RANKS, MAX_WORKERS
from flambeau.config.server import MetricsConfig, ServerConfig
from flambeau.config.value_types import (
    Choice,
    ClusterManager,
    FilePath,
    ModelDefaults,
    ModelList,
    Number,
    RegularExpression,
    Several,
    Switch,
    Text,
    ValueType,
    Whole,
)

PREFIX = "FLAMBEAU_"
MASK = "********"
# names_json: a reply that is JSON is labeled so. auto_detect: metrics of handlers need no entry in metrics.yaml.
DEFAULTS = ServerConfig(
    pages=True,
    names_json=True,
    suggests_names=True,
    plain_errors=True,
    exact_paths=True,
    full_access_log=True,
    idempotency_cache_mb=64,
    measure=MetricsConfig(auto_detect=True),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `--help` shows the basic ones, `--help-all` all of them."""

    name: str
    type: ValueType
    help: str
    field: str = ""  # of ServerConfig, such as `measure.mode`; empty: the command reads it
    group: str = ""
    own_default: Any = None  # of a setting without a field
    unset: str = ""  # what holds without a value, for the help
    flags: tuple[str, ...] = ()  # if they are not `--name`, or `--name` and `--no-name` for a switch
    is_basic: bool = False
    is_secret: bool = False
    is_argument: bool = False  # the arguments of the command set it, not a flag

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return self.flags[0] if self.flags else "--" + self.name.replace("_", "-")

    @property
    def off_flag(self) -> str:
        return self.flags[1] if self.flags else "--no-" + self.name.replace("_", "-")

    @property
    def default(self) -> Any:
        """None if there is none."""
        if not self.field or self.own_default is not None:
            return self.own_default
        value: Any = DEFAULTS
        for part in self.field.split("."):
            value = None if value is None else getattr(value, part)
        return None if value in ("", (), {}) else value

    def show(self, value: Any) -> str:
        """A value for readers: as a variable would hold it, or masked; empty for None."""
        if value is None:
            return ""
        return MASK if self.is_secret else self.type.show(value)


def _group(title: str, *settings: Setting) -> tuple[Setting, ...]:
    return tuple(replace(setting, group=title) for setting in settings)


_port, _size, _seconds, _wait = Whole(at_most=65535), Whole(at_least=1), Number(), Number(at_least=0.1)
_workers = Whole(at_most=MAX_WORKERS)
_header = Text(pattern=r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", expected="the name of a header")  # RFC 9110, 5.6.2
_header_value = Text(pattern=r"[ -~]+", expected="the value of a header: printable ASCII")
_address = Text(metavar="ADDRESS", expected="http://host:port, https://host:port or unix:/path")
_modes = Choice(("prometheus", "log", "both", "legacy"))
_levels = Choice(("debug", "info", "warning", "error"))

# Each applies to every model that is named at start, and takes precedence over its model-config.yaml. In the
# configuration file an entry of `models` may have them for itself.
MODEL_SETTINGS = _group(
    "Models",
    Setting("name", Text(), "Model name.", unset="from the manifest or the file name", is_basic=True),
    Setting("handler", Text(), "Built-in name or file of the handler, instead of the model's own.", is_basic=True),
    Setting("workers", _workers, "Workers per model.", unset="from model-config.yaml, or 1", is_basic=True),
    Setting(
        "batch_size",
        Whole(at_least=1, at_most=65_536),
        "Maximum number of requests in a batch.",
        unset="from model-config.yaml, or 1",
        is_basic=True,
    ),
    Setting("max_batch_delay", Whole(), "Milliseconds to wait for a batch to fill.", unset="0", is_basic=True),
    Setting("response_timeout", _wait, "Seconds a worker may take for a batch.", unset="120", is_basic=True),
    Setting(
        "startup_timeout",
        _wait,
        "Seconds a worker may take to load its model; 1200 for a checkpoint.",
        unset="120",
        is_basic=True,
    ),
)

_DEFAULT_TYPES: dict[str, ValueType] = {  # by the name of a setting of a model
    "workers": Whole(at_least=1, at_most=MAX_WORKERS),
    "batch_size": Whole(at_least=1, at_most=65_536),
    "max_batch_delay": Whole(at_least=1),
    "response_timeout": _size,
    "startup_timeout": _size,
}

SERVER_SETTINGS = (
    *_group(
        "Models",
        Setting(
            "model_store",
            FilePath(),
            "Folder from which models can be registered while the server runs.",
            "model_store",
            unset="the first folder of models among the paths",
            is_basic=True,
        ),
        Setting(
            "state",
            FilePath(),
            "File that keeps what is changed while the server runs (models, workers, defaults) for its next start.",
            unset="changes are lost when the server stops",
            is_basic=True,
        ),
        Setting(
            "workflow_store", FilePath(), "Folder of workflow archives.", "workflow_store", unset="the model store"
        ),
        Setting(
            "allow_missing",
            Switch(),
            "Report ready although models that the server started with could not be loaded.",
            "allow_missing",
            is_basic=True,
        ),
        Setting("watch", Switch(), "Reload handlers when their code changes.", "watch", is_basic=True),
        Setting(
            "install_dependencies",
            Switch(),
            "Install the requirements of each model for its workers.",
            "install_dependencies",
            is_basic=True,
        ),
        Setting(
            "ignore_shared_pins",
            Switch(),
            "Ignore requirements that want another torch than the server's, with a warning.",
            "ignore_shared_pins",
        ),
        Setting(
            "model_defaults",
            ModelDefaults(_DEFAULT_TYPES),
            "Settings by model name, for models whose model-config.yaml does not have them.",
            "models",
        ),
        Setting("default_handler", Text(), "Handler of archives that name none.", "default_handler"),
        Setting("envelope", Text(), "Envelope around every handler.", "service_envelope"),
        Setting("decode_input_request", Switch(), "Decode JSON and text before a handler.", "decode_input_request"),
        Setting("limit_max_image_pixels", Switch(), "Keep Pillow's limit on images.", "limit_max_image_pixels"),
        Setting(
            "default_workers",
            _workers,
            "Workers of a model registered without a number; 0: one for each GPU, or one.",
            "default_workers",
        ),
        Setting(
            "default_response_timeout",
            _wait,
            "Seconds a worker may take for a batch, unless the model sets it.",
            "default_response_timeout_s",
        ),
        Setting(
            "default_startup_timeout",
            _wait,
            "Seconds a worker may take to load, unless the model sets it.",
            "default_startup_timeout_s",
        ),
    ),
    *_group(
        "Addresses",
        Setting(
            "host",
            Text(),
            "Address to listen on; 0.0.0.0 for all interfaces.",
            own_default="127.0.0.1",
            is_basic=True,
        ),
        Setting("port", _port, "Port of the inference API; 0 for any free port.", own_default=8080, is_basic=True),
        Setting(
            "management_port",
            _port,
            "Port of the management API; 0 for any free port.",
            own_default=8081,
            is_basic=True,
        ),
        Setting("metrics_port", _port, "Port of the metrics API; 0 disables it.", own_default=8082, is_basic=True),
        Setting("grpc_port", _port, "Port of gRPC inference; 0 disables it.", own_default=0, is_basic=True),
        Setting("grpc_management_port", _port, "Port of gRPC management; 0 disables it.", own_default=0, is_basic=True),
        Setting(
            "inference_address", _address, "Of the inference API, instead of host and port.", unset="host and port"
        ),
        Setting("management_address", _address, "Of the management API, likewise.", unset="host and management_port"),
        Setting("metrics_address", _address, "Of the metrics API, likewise.", unset="host and metrics_port"),
        Setting("grpc_host", Text(), "Address of gRPC inference.", unset="host"),
        Setting("grpc_management_host", Text(), "Address of gRPC management.", unset="host"),
        Setting("open_inference", Switch(), "Serve the KServe v2 API.", "open_inference"),
        Setting(
            "strict_calls", Switch(), "Refuse parameters and KServe bodies that are not understood.", "strict_calls"
        ),
    ),
    *_group(
        "TLS",
        Setting(
            "certificate_file",
            FilePath(),
            "PEM file with the certificate and its chain. With it, every port uses TLS.",
            "tls.certificate_file",
            is_basic=True,
        ),
        Setting(
            "private_key_file", FilePath(), "PEM file with its private key.", "tls.private_key_file", is_basic=True
        ),
        Setting("keystore", FilePath(), "Key store, instead of the two PEM files.", "tls.keystore"),
        Setting("keystore_pass", Text(), "Password of the key store.", "tls.keystore_pass", is_secret=True),
        Setting("keystore_type", Text(), "Type of the key store.", "tls.keystore_type"),
        Setting(
            "client_ca_file",
            FilePath(),
            "PEM file of authorities; clients without a certificate of theirs are refused.",
            "tls.client_ca_file",
        ),
        Setting("grpc_tls", Switch(), "TLS on the gRPC ports.", unset="if there is a certificate"),
    ),
    *_group(
        "Access",
        Setting(
            "require_token",
            Switch(),
            "Require API keys.",
            "keys.is_on",
            unset="unless the host is loopback",
            flags=("--require-token", "--no-token"),
            is_basic=True,
        ),
        Setting(
            "allow_unprotected",
            Switch(),
            "Allow --no-token on an address that other machines can reach.",
            "allow_unprotected",
            is_basic=True,
        ),
        Setting("key_file", FilePath(), "Where the keys are; see `flambeau keys`.", "keys.file", is_basic=True),
        Setting("key_expiry", _seconds, "Seconds until new keys expire.", "keys.expiry_s", unset="they do not expire"),
        Setting("ping_needs_key", Switch(), "Whether /ping needs a key.", "keys.ping_needs_key"),
        Setting("metrics_needs_key", Switch(), "Whether /metrics needs a key.", "keys.metrics_needs_key"),
        Setting(
            "allow_host",
            Several(Text(metavar="NAME")),
            "A name of the server in URLs, such as *.example.com; needed without a token.",
            "allowed_hosts",
            is_basic=True,
        ),
        Setting("cors_allowed_origin", _header_value, "Web pages of this site may use the APIs, or * for all.", "cors"),
        Setting(
            "cors_allowed_methods",
            _header_value,
            "Methods that such pages may use; by default GET, POST, PUT and DELETE.",
            "cors",
        ),
        Setting("cors_allowed_headers", _header_value, "Headers that such pages may send; by default all.", "cors"),
        Setting("model_api", Switch(), "Register and unregister models over the APIs.", "model_api"),
        Setting(
            "allow_url",
            Several(RegularExpression()),
            "Regular expression of URLs from which models may be downloaded.",
            "allowed_urls",
            is_basic=True,
        ),
        Setting(
            "allow_uploads",
            Switch(),
            "Let the console put archives into the model store; whoever may manage models can then run code.",
            "allow_uploads",
        ),
        Setting(
            "allow_private_urls", Switch(), "Allow downloads from addresses in private networks.", "allow_private_urls"
        ),
        Setting(
            "safe_weights", Switch(), "Reject model files of formats that can run code.", "safe_weights", is_basic=True
        ),
        Setting("weights_only", Switch(), "Loading weights runs no code, unless the model sets it.", "weights_only"),
        Setting(
            "error_details",
            Switch(),
            "Include tracebacks in error responses.",
            "error_details",
            unset="only on a loopback host",
            is_basic=True,
        ),
    ),
    *_group(
        "Limits",
        Setting(
            "job_queue_size", _size, "Maximum number of waiting requests per model.", "job_queue_size", is_basic=True
        ),
        Setting("max_request_size", _size, "Maximum size of a request in bytes.", "max_request_bytes", is_basic=True),
        Setting(
            "max_response_size",
            _size,
            "Maximum size of a response, or of a part of a stream, in bytes.",
            "max_response_bytes",
            is_basic=True,
        ),
        Setting(
            "drain_timeout",
            _seconds,
            "Seconds to finish accepted requests when the server stops.",
            "drain_timeout_s",
            is_basic=True,
        ),
        Setting("max_gpus", Whole(), "Maximum number of GPUs to use.", "number_of_gpus", unset="all", is_basic=True),
        Setting("max_workers_per_model", _size, "Maximum number that a client may ask for.", "max_workers_per_model"),
        Setting("unregister_timeout", _seconds, "Seconds to unregister a model.", "unregister_timeout_s"),
        Setting(
            "idempotency_cache_mb",
            Whole(),
            "MB of responses that are kept for repeated requests with the same Idempotency-Key; 0: it has no effect.",
            "idempotency_cache_mb",
        ),
        Setting(
            "idempotency_cache_s", _seconds, "Seconds that each of these responses is kept.", "idempotency_cache_s"
        ),
        Setting("keep_alive_timeout", _seconds, "Seconds that an idle connection stays open.", "keep_alive_s"),
        Setting(
            "request_read_timeout",
            _seconds,
            "Seconds without progress while a request is received.",
            "request_read_timeout_s",
        ),
        Setting(
            "response_read_timeout",
            _seconds,
            "Seconds for a client to read 1 MB of a response, or all of it.",
            "response_read_timeout_s",
        ),
        Setting(
            "max_connections_per_address",
            Whole(),
            "HTTP connections of one client address; 0: no limit.",
            "max_connections_per_address",
        ),
        Setting("grpc_max_connection_age", _seconds, "Seconds of a gRPC connection.", "grpc.inference_max_age_s"),
        Setting("grpc_max_connection_age_grace", _seconds, "Seconds to end it.", "grpc.inference_max_age_grace_s"),
        Setting(
            "grpc_management_max_connection_age",
            _seconds,
            "Seconds of a connection to gRPC management.",
            "grpc.management_max_age_s",
        ),
        Setting(
            "grpc_management_max_connection_age_grace",
            _seconds,
            "Seconds to end it.",
            "grpc.management_max_age_grace_s",
        ),
        Setting(
            "min_download_rate",
            Whole(),
            "Bytes per second, over 30 s, below which a download is aborted; 0: none.",
            "min_download_rate",
        ),
    ),
    *_group(
        "Workers",
        Setting("worker_transport", Choice(("unix", "tcp")), "Sockets between server and workers.", "worker_transport"),
        Setting(
            "shared_memory_from",
            _size,
            "Bytes from which a body goes through shared memory.",
            "shared_memory_from_bytes",
        ),
        Setting("hide_env", RegularExpression(), "Workers do not inherit variables whose name matches.", "hidden_env"),
        Setting("first_worker_id", Whole(), "Number of the first worker.", "first_worker_id"),
        Setting(
            "first_distribution_port",
            _port,
            "First port of workers that are groups of processes.",
            "first_distribution_port",
        ),
        Setting("sequence_id_header", _header, "Header with the id of a sequence.", "sequence_headers.id"),
        Setting("sequence_start_header", _header, "Header that starts a sequence.", "sequence_headers.start"),
        Setting("sequence_end_header", _header, "Header that ends a sequence.", "sequence_headers.end"),
    ),
    *_group(
        "Cluster",
        Setting(
            "cluster",
            ClusterManager(),
            "Place workers on the machines of a Ray cluster. Without an address, RAY_ADDRESS has it.",
            "cluster.manager",
            is_basic=True,
        ),
        Setting(
            "worker_address",
            Text(metavar="HOST:PORT", pattern=r"[^\s/]+:\d+", expected="HOST:PORT, an address of this machine"),
            "Where workers of other machines connect, inside TLS.",
            "cluster.worker_address",
            unset="port 7075 of the address that reaches the cluster",
            is_basic=True,
        ),
        Setting(
            "worker_heartbeat",
            Number(at_least=2, at_most=3600),
            "Seconds after which a silent machine counts as lost.",
            "cluster.heartbeat_s",
        ),
    ),
    *_group(
        "Logs and metrics",
        Setting("log_level", _levels, "Least severity that is logged.", own_default="info", is_basic=True),
        Setting(
            "log_format",
            Choice(("text", "json")),
            "Layout of log lines; json: one document a line.",
            "log_format",
            is_basic=True,
        ),
        Setting(
            "log_folder",
            FilePath(),
            "Folder for log files (ts_log.log and others).",
            "log_folder",
            unset="log to stderr only",
            is_basic=True,
        ),
        Setting(
            "access_log", Switch(), "Log every request.", "access_log", unset="only with --log-folder", is_basic=True
        ),
        Setting(
            "files_folder",
            FilePath(),
            "Folder for the files and batches of OpenAI's API.",
            "files_folder",
            unset="no files and batches",
        ),
        Setting(
            "crash_folder",
            FilePath(),
            "Folder for crash bundles.",
            "crash_folder",
            unset="crashes in the log folder, or a temporary folder",
        ),
        Setting("crash_bundles", Whole(), "Crash bundles that are kept; 0: none.", "crash_bundles"),
        Setting(
            "crash_payloads",
            Switch(),
            "Store the requests of a worker that died in its crash bundle.",
            "crash_payloads",
        ),
        Setting("metrics_log_folder", FilePath(), "For metrics logs.", "metrics_log_folder", unset="the log folder"),
        Setting("metrics_mode", _modes, "Where metrics go.", "measure.mode", is_basic=True),
        Setting(
            "metrics_config", FilePath(), "A metrics.yaml.", "measure.file", unset="the built-in one", is_basic=True
        ),
        Setting(
            "metrics_auto_detect", Switch(), "Accept metrics of handlers that no file names.", "measure.auto_detect"
        ),
        Setting(
            "metrics_vllm_names", Switch(), "Metrics of language models under vLLM's names too.", "measure.vllm_names"
        ),
        Setting("tracing", Switch(), "Send spans where OTEL_* variables say.", "tracing.is_on", is_basic=True),
        Setting(
            "trace_sampling",
            Number(at_most=1),
            "Share of requests to trace, of those without a traceparent.",
            "tracing.sampling",
            is_basic=True,
        ),
        Setting("system_metrics", Switch(), "Measure the machine.", "measure.system"),
        Setting("system_metrics_command", Text(), "Command that measures it.", "measure.system_command"),
        Setting("metrics_interval", _size, "Seconds between two measurements.", "measure.interval_s"),
    ),
)

# The fields of `handler:` in the model-config.yaml that `flambeau llm serve` writes.
ENGINE_SETTINGS = _group(
    "Engine",
    Setting(
        "draft",
        FilePath(is_model=True),
        "Smaller checkpoint, or head (EAGLE, DFlash), that drafts tokens (speculative decoding).",
        is_basic=True,
    ),
    Setting(
        "speculative",
        Choice(("lookup", "mtp")),
        "Speculation without a draft: n-grams of the text, or the checkpoint's own layer (multi-token prediction).",
        unset="none",
        is_basic=True,
    ),
    Setting("speculate_k", Whole(at_least=1, at_most=16), "Drafted tokens per step.", unset="5", is_basic=True),
    Setting("tokenizer", FilePath(), "Tokenizer.", unset="in the checkpoint", is_basic=True),
    Setting(
        "dtype",
        Choice(("float32", "bfloat16", "float16")),
        "Type of the weights.",
        unset="float32 on a CPU, the checkpoint's on a GPU",
        is_basic=True,
    ),
    Setting("quantization", Choice(("int8", "int4", "fp8")), "Quantize on load.", unset="no", is_basic=True),
    Setting("lora", Several(Text(metavar="NAME=FOLDER")), "LoRA adapter, and the name for requests.", is_basic=True),
    Setting("max_num_seqs", _size, "Maximum number of running sequences.", is_basic=True),
    Setting("max_model_len", Whole(at_least=2), "Maximum number of tokens per sequence.", is_basic=True),
    Setting(
        "tensor_parallel",
        Whole(at_least=1, at_most=MAX_RANKS),
        "Number of processes (GPUs) that share the model.",
        own_default=1,
        is_basic=True,
    ),
    Setting("compile", Switch(), "Compile in the background while serving.", is_basic=True),
    Setting("resume", Switch(), "Continue a generation on another worker if its worker dies.", is_basic=True),
    Setting("tool_parser", Text(), "Notation of the model's tool calls.", unset="by the chat template"),
    Setting("reasoning_parser", Text(), "Notation of the model's reasoning.", unset="by the chat template"),
    Setting(
        "model_impl",
        Choice(("auto", "flambeau", "transformers")),
        "Whose network computes the model.",
        unset="transformers' for models that the engine does not know",
    ),
)

MODEL_LIST = Setting(
    "models",
    ModelList({setting.name: setting.type for setting in MODEL_SETTINGS}),
    "Models to serve, as the arguments of the command.",
    group="Models",
    unset="two examples, if there is no model store",
    is_argument=True,
)
SERVE = (MODEL_LIST, *MODEL_SETTINGS, *SERVER_SETTINGS)
LLM_SERVE = (
    *ENGINE_SETTINGS,
    *(setting for setting in MODEL_SETTINGS if setting.name != "handler"),
    *SERVER_SETTINGS,
)
EVERY = (*SERVE, *ENGINE_SETTINGS)
