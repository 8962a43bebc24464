"""Which value of each setting holds: that of the flag, else of the variable, else of the file, else the default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flambeau.config.server import ANY_VERSION, KEY_VARIABLES, Address, ServerConfig, with_field
from flambeau.config.settings import DEFAULTS, EVERY, PREFIX, Setting
from flambeau.config.value_types import FilePath, InvalidEntry, ModelEntry, ModelList, Whole, mismatch, unknown
from flambeau.config.yaml_file import LinedMapping, read_lined
from flambeau.errors import ConfigError, suggest

# Read by other commands, by workers or by clients. NAME_SERVICE_… and NAME_PORT_… are set by Kubernetes for a service.
OTHER_VARIABLES = (
    *KEY_VARIABLES.values(),
    *(PREFIX + name for name in ("CONFIG", "URL", "MANAGEMENT_URL", "KEY", "CACHE", "START_FOLDER", "WORKER_TOKEN")),
)
KUBERNETES = (f"{PREFIX}SERVICE_", f"{PREFIX}PORT_")
MIN_SIMILARITY = 0.75  # of a variable that is not known, to be reported
_LISTENERS = {"inference": "port", "management": "management_port", "metrics": "metrics_port"}
_CORS = {
    "cors_allowed_origin": "Access-Control-Allow-Origin",
    "cors_allowed_methods": "Access-Control-Allow-Methods",
    "cors_allowed_headers": "Access-Control-Allow-Headers",
}
# What pages of an allowed origin need to send JSON and a key; `*` does not cover the Authorization header.
PAGE_CALLS = {"cors_allowed_methods": "GET, POST, PUT, DELETE", "cors_allowed_headers": "Authorization, *"}


Origin = Literal["default", "file", "environment", "flag"]


@dataclass(frozen=True, slots=True)
class SettingValue:
    """The value of a setting that holds; `source` is the flag, the variable, or the file and line."""

    value: Any
    origin: Origin
    source: str = ""


class Settings:
    """The values that hold, by name. `warnings` are for the log, once it is open."""

    def __init__(self, held: Mapping[str, SettingValue], warnings: Sequence[str] = ()) -> None:
        self.held = held
        self.warnings = warnings

    def __getitem__(self, name: str) -> Any:
        return self.held[name].value

    def is_given(self, name: str) -> bool:
        return self.held[name].origin != "default"

    def is_forced(self, name: str) -> bool:
        """Whether a flag or a variable sets it."""
        return self.held[name].origin in ("environment", "flag")


def resolve(
    table: Sequence[Setting], *, flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> Settings:
    """The value of every setting of a command; `flags` are read already."""
    names = {setting.name for setting in table}
    if foreign := [one.flag for one in EVERY if flags.get(one.name) is not None and one.name not in names]:
        raise ConfigError(f"{foreign[0]} is not a setting of this command")
    held = {setting.name: SettingValue(setting.default, "default") for setting in table}
    held |= {} if file is None else read_settings_file(file, table)
    held |= read_environment(environment, table)
    for setting in table:
        if flags.get(setting.name) is not None:
            flag = setting.off_flag if flags[setting.name] is False else setting.flag
            held[setting.name] = SettingValue(flags[setting.name], "flag", "" if setting.is_argument else flag)
    return Settings(held, unknown_variables(environment))


def read_environment(environment: Mapping[str, str], table: Sequence[Setting]) -> dict[str, SettingValue]:
    """The settings in FLAMBEAU_… variables; an empty one counts as not set."""
    found = {}
    for setting in table:
        text = environment.get(setting.variable, "")
        if not text or (isinstance(setting.type, Whole) and text.startswith(("tcp://", "udp://"))):
            continue  # Kubernetes sets FLAMBEAU_PORT=tcp://… in every pod beside a service named flambeau
        try:
            found[setting.name] = SettingValue(setting.type.read(text), "environment", setting.variable)
        except ValueError as error:
            shown = "(hidden)" if setting.is_secret else text
            raise ConfigError(mismatch(setting.variable, shown, setting.type, error)) from None
    return found


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A warning for each variable that is nearly one of ours."""
    known = {setting.variable.lower(): setting.variable for setting in EVERY}
    known |= {variable.lower(): variable for variable in OTHER_VARIABLES}
    names = [name for name in environment if name.startswith(PREFIX) and name not in known.values()]
    warnings = []
    for name in names:
        near = None if name.startswith(KUBERNETES) else suggest(name, known, cutoff=MIN_SIMILARITY)
        if near is not None:
            warnings.append(f"{name} is not a setting and has no effect; did you mean {known[near]}?")
    return warnings


def read_settings_file(path: Path, table: Sequence[Setting]) -> dict[str, SettingValue]:
    """The settings in a YAML file. Relative paths in it are relative to its folder."""
    document = read_lined(path)
    known = {setting.name: setting for setting in table}
    return {
        str(key): _read_key(path, document, str(key), known)
        for key, value in document.values.items()
        if value is not None  # `key:` without a value leaves the default
    }


def _read_key(path: Path, document: LinedMapping, key: str, known: Mapping[str, Setting]) -> SettingValue:
    place = f"{path}, line {document.line_of(key)}"
    if key not in known:
        elsewhere = key in {setting.name for setting in EVERY}
        what = "a setting of this command" if elsewhere else "a setting"
        raise ConfigError(f"{place}: {unknown(key, () if elsewhere else known, what)}")
    setting = known[key]
    try:
        value = setting.type.read(document.values[key])
    except InvalidEntry as error:
        raise ConfigError(f"{path}, line {document.line_of(key, *error.keys)}: {error}") from None
    except ValueError as error:
        shown = "(hidden)" if setting.is_secret else document.values[key]
        raise ConfigError(f"{place}: {mismatch(key, shown, setting.type, error)}") from None
    if isinstance(setting.type, FilePath):
        value = path.parent / value
    elif isinstance(setting.type, ModelList):
        value = tuple(_beside(path.parent, entry) for entry in value)
    return SettingValue(value, "file", place)


def _beside(folder: Path, entry: ModelEntry) -> ModelEntry:
    """An entry of `models` with its path in the folder of the file, if it is there."""
    beside = folder / entry.path
    return replace(entry, path=beside) if beside.exists() else entry


def to_server_config(settings: Settings, table: Iterable[Setting]) -> ServerConfig:
    """The configuration of the server; an error if two settings contradict each other."""
    config = DEFAULTS
    for setting in table:
        if setting.field not in ("", "cors", "models") and settings.is_given(setting.name):
            config = with_field(config, setting.field, settings[setting.name])
    is_tls = settings["certificate_file"] is not None or settings["keystore"] is not None
    listeners = {name: _listener(settings, name, port, is_tls=is_tls) for name, port in _LISTENERS.items()}
    grpc = replace(
        config.grpc,
        inference=_grpc_listener(settings, "grpc_port", "grpc_host"),
        management=_grpc_listener(settings, "grpc_management_port", "grpc_management_host"),
        is_tls=is_tls if settings["grpc_tls"] is None else settings["grpc_tls"],
    )
    known = PAGE_CALLS if settings["cors_allowed_origin"] else {}
    cors = tuple((header, value) for name, header in _CORS.items() if (value := settings[name] or known.get(name)))
    models = {name: {ANY_VERSION: _with_key_names(own)} for name, own in (settings["model_defaults"] or {}).items()}
    inference, management = (listeners[name] or Address() for name in ("inference", "management"))
    return replace(
        config,
        inference=inference,
        management=management,
        metrics=listeners["metrics"],
        grpc=grpc,
        cors=cors,
        models=models,
    )


def _with_key_names(own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a model by the keys of model-config.yaml."""
    keys = {
        "workers": ("minWorkers", "maxWorkers"),
        "batch_size": ("batchSize",),
        "max_batch_delay": ("maxBatchDelay",),
        "response_timeout": ("responseTimeout",),
        "startup_timeout": ("startupTimeout",),
    }
    return {key: value for name, value in own.items() for key in keys[name]}


def _listener(settings: Settings, name: str, port: str, *, is_tls: bool) -> Address | None:
    """The address of an HTTP API, from its own setting or from host and port; None if it is disabled."""
    address = settings.held[f"{name}_address"]
    if address.origin == "default":
        if name == "metrics" and not settings[port]:
            return None
        return Address(settings["host"], settings[port], is_tls=is_tls)
    if settings.is_given(port):
        other = settings.held[port].source
        raise ConfigError(f"{address.source} and {other} both set the address of the {name} API; remove one of them")
    try:
        return Address.parse(address.value, default_port=settings[port])
    except ConfigError as error:
        raise ConfigError(f"{address.source}: {error}") from None


def _grpc_listener(settings: Settings, port: str, host: str) -> Address | None:
    return Address(settings[host] or settings["host"], settings[port]) if settings[port] else None
