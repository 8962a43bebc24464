"""`flambeau config show`: prints the settings that hold, and where each one comes from."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flambeau.cli.output import print_json, print_table
from flambeau.config.resolution import Settings, SettingValue, to_server_config
from flambeau.config.server import check_protection
from flambeau.config.settings import Setting


def show(settings: Settings, table: Sequence[Setting], *, changed: bool, as_json: bool) -> None:
    """Print the settings; an error if the server would not start with them."""
    for warning in settings.warnings:
        print(f"flambeau: {warning}", file=sys.stderr)
    check_protection(to_server_config(settings, table))
    shown = [one for one in table if not changed or settings.is_given(one.name)]
    if as_json:
        print_json([to_document(one, settings.held[one.name]) for one in shown])
        return
    rows = [[one.name, value_text(one, settings), source_text(settings.held[one.name])] for one in shown]
    print_table(["SETTING", "VALUE", "FROM"], rows)


def value_text(setting: Setting, settings: Settings) -> str:
    value = settings[setting.name]
    if value is None:
        return f"({setting.unset})" if setting.unset else "-"
    return setting.show(value)


def source_text(held: SettingValue) -> str:
    return held.source or {"flag": "the command line"}.get(held.origin, held.origin)


def to_document(setting: Setting, held: SettingValue) -> dict[str, str | None]:
    value = None if held.value is None else setting.show(held.value)
    return {"setting": setting.name, "value": value, "origin": held.origin, "source": held.source or None}
