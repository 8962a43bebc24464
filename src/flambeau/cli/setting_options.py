"""The flags of commands that serve, made from the table of settings."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main

from flambeau.config.resolution import Settings, resolve
from flambeau.config.settings import Setting
from flambeau.config.value_types import Choice, FilePath, ModelList, Several, Switch, brief

MORE = "Show all options and exit."
FILE = "YAML file of settings. Variables and flags take precedence over it."
ALL_SHOWN = "flambeau.all_options"


@dataclass(frozen=True, slots=True)
class SettingFlags:
    """The settings on the command line, and the configuration file."""

    values: Mapping[str, Any]
    file: str | Path | None

    def resolve(self, table: Sequence[Setting]) -> Settings:
        return resolve(table, flags=self.values, environment=os.environ, file=Path(self.file) if self.file else None)


def format_options(ctx: Any, formatter: Any, params: Sequence[Any], table: Sequence[Setting]) -> None:
    """Write the help of a command's parameters, settings by group."""
    shows_all = ctx.meta.get(ALL_SHOWN, False)
    names = {setting.name for setting in table}
    others = [one for one in params if one.name not in names]
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        records = [one.get_help_record(ctx) for one in others if one.param_type_name == kind]
        write_section(formatter, title, [record for record in records if record is not None])
    shown = [one for one in table if not one.is_argument and (one.is_basic or shows_all)]
    for group in dict.fromkeys(setting.group for setting in shown):
        write_section(formatter, group, [help_record(one) for one in shown if one.group == group])


def read_flags(params: dict[str, Any], table: Sequence[Setting]) -> SettingFlags:
    """Take the settings out of the parameters that typer has parsed."""
    params.pop("help_all")
    values = {setting.name: read_flag(setting, params.pop(setting.name)) for setting in table}
    return SettingFlags(values, params.pop("config"))


def make_params(table: Sequence[Setting]) -> Sequence[Any]:
    """The parameters of a command that typer makes from a signature with all options."""

    def command() -> None: ...

    parameters = [*setting_parameters(table)]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return typer.main.get_command(app).params


def read_flag(setting: Setting, given: Any) -> Any:
    """The value of a flag; None if it was not given."""
    if given is None or given in ([], ()):
        return None
    try:
        return setting.type.read(given)
    except ValueError as error:
        reason = f" ({error})" if str(error) else ""
        alone = given[0] if isinstance(given, list | tuple) and len(given) == 1 else given
        shown = "(hidden)" if setting.is_secret else brief(alone)
        raise typer.BadParameter(f"{shown} is not {setting.type.expected}{reason}", param_hint=setting.flag) from None


def setting_parameters(table: Sequence[Setting]) -> Iterator[inspect.Parameter]:
    yield keyword("config", Path | None, typer.Option(metavar="FILE", envvar="FLAMBEAU_CONFIG", help=FILE))
    for setting in table:
        yield keyword(setting.name, *typed_option(setting))
    yield keyword("help_all", bool, typer.Option("--help-all", is_eager=True, help=MORE, callback=show_all), False)


def keyword(name: str, type_: Any, option: Any, default: Any = None) -> inspect.Parameter:
    annotation = Annotated[type_, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def typed_option(setting: Setting) -> tuple[Any, Any]:
    """The type of a flag for the shell's completion, and its option. The setting itself reads the value."""
    kind = setting.type
    if isinstance(kind, ModelList):
        return list[str] | None, typer.Argument(metavar="PATHS", hidden=True)
    if isinstance(kind, Switch):
        return bool | None, typer.Option(f"{setting.flag}/{setting.off_flag}", help=setting.help)
    words = list(kind.words) if isinstance(kind, Choice) else []
    option = typer.Option(
        setting.flag,
        metavar=kind.metavar,
        help=setting.help,
        autocompletion=(lambda: words) if words else None,
    )
    if isinstance(kind, Several):
        return list[str] | None, option
    return (Path if isinstance(kind, FilePath) and not kind.is_model else str) | None, option


def show_all(ctx: typer.Context, is_given: bool) -> None:
    if is_given:
        ctx.meta[ALL_SHOWN] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


def write_section(formatter: Any, title: str, records: Sequence[tuple[str, str]]) -> None:
    if records:
        with formatter.section(title):
            formatter.write_dl(records)


def help_record(setting: Setting) -> tuple[str, str]:
    """The two columns of a setting in the help."""
    default = setting.unset or setting.show(setting.default)
    is_off = isinstance(setting.type, Switch) and not setting.default and not setting.unset
    text = setting.help + (" Repeatable." if isinstance(setting.type, Several) else "")
    text += f" Default: {default}." if default and not is_off else ""
    if not isinstance(setting.type, Switch):
        return f"{setting.flag} {setting.type.metavar}", text
    return setting.flag if is_off else f"{setting.flag} / {setting.off_flag}", text
