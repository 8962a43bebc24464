"""Print the tables of settings for docs/configuration.md: `python scripts/settings_table.py [--llm | --keys]`."""

from __future__ import annotations

import sys

from flambeau.config.settings import ENGINE_SETTINGS, EVERY, SERVE, Setting
from flambeau.torchserve.config_keys import CORS, KEYS

# Keys of config.properties whose setting is not found by the field that both set.
BY_HAND = {
    "inference_address": "inference_address",
    "management_address": "management_address",
    "metrics_address": "metrics_address",
    "enable_metrics_api": "metrics_port",
    "grpc_inference_address": "grpc_host",
    "grpc_inference_port": "grpc_port",
    "grpc_management_address": "grpc_management_host",
    "grpc_management_port": "grpc_management_port",
    "enable_grpc_ssl": "grpc_tls",
    "load_models": "models",
    "models": "model_defaults",
    **{key: key for key in CORS},
}


def default_of(setting: Setting) -> str:
    if setting.unset:
        return setting.unset
    return f"`{setting.type.show(setting.default)}`" if setting.default is not None else "none"


def rows(table: tuple[Setting, ...]) -> list[str]:
    """Markdown of the settings, with a heading for each group."""
    lines: list[str] = []
    for group in dict.fromkeys(setting.group for setting in table):
        lines += [f"### {group}", "", "| setting | default | meaning |", "|---|---|---|"]
        lines += [f"| `{one.name}` | {default_of(one)} | {one.help} |" for one in table if one.group == group]
        lines.append("")
    return lines


def renamed_keys() -> dict[str, str]:
    """The keys of config.properties whose setting has another name."""
    by_field = {setting.field: setting.name for setting in EVERY if setting.field}
    found = {key: BY_HAND.get(key) or by_field[entry.field_path] for key, entry in KEYS.items()} | BY_HAND
    return {key: name for key, name in found.items() if key != name}


if __name__ == "__main__":
    if "--keys" in sys.argv:
        print("\n".join(f"| `{key}` | `{name}` |" for key, name in renamed_keys().items()))
    else:
        print("\n".join(rows(ENGINE_SETTINGS if "--llm" in sys.argv else SERVE)))
