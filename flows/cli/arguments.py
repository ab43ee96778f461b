"""Arguments and options that several commands share."""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows import settings
from flows.settings import environment

if TYPE_CHECKING:
    from flows.settings.config_file import LoadedConfig

DEFAULT_CONFIG_PATH = Path("nightly.yaml")
ConfigPath = Annotated[Path, typer.Argument(metavar="FILE", help="config file, written by `nightjar init`")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="replace a setting, e.g. training.epochs=3")
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON, in the last line of stdout")]
ChangeReason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="why the champion changes; a tag of both versions")]
PrefectPort = Annotated[int, typer.Option(help="port of the Prefect UI")]
MlflowPort = Annotated[int, typer.Option(help="port of the MLflow UI")]


@dataclass(frozen=True)
class ConfigOptions:
    """The argument FILE and the options --set and --json of a command."""

    path: Path
    overrides: tuple[str, ...] = ()
    as_json: bool = False

    def with_settings(self, settings: Mapping[str, object]) -> "ConfigOptions":
        """Return the options with an override for each setting that is not None."""
        overrides = (f"{name}={_json_for_yaml(value)}" for name, value in settings.items() if value is not None)
        return replace(self, overrides=(*self.overrides, *overrides))

    def read(self) -> "LoadedConfig":
        """Return the config."""
        return settings.config_file.LoadedConfig.read(self.path, self.overrides)

    def prepare(self) -> "LoadedConfig":
        """Return the config, and set the environment variables for Prefect and MLflow, which must be imported later."""
        loaded_config = self.read()
        environment.prepare_environment(loaded_config.config.workspace)
        return loaded_config


def _json_for_yaml(value: object) -> str:
    """Return JSON that YAML reads back as `value`.

    By default, JSON escapes an emoji as two surrogates, which YAML does not join. YAML reads an unescaped U+0085 as a blank.
    """
    json_text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f]", lambda match: f"\\u{ord(match[0]):04x}", json_text)


@dataclass(frozen=True)
class InputOptions:
    """The options of `nightjar init` that describe the input files."""

    log: Annotated[str | None, typer.Option(help="parquet file, folder or glob with the interaction log")] = None
    test: Annotated[str | None, typer.Option(help="parquet file or glob with the test events, if the log is already split")] = (
        None
    )
    items: Annotated[str | None, typer.Option(help="parquet file with features of the items")] = None
    vectors: Annotated[str | None, typer.Option(help="parquet file with pretrained vectors of the items")] = None
    user_column: Annotated[str | None, typer.Option(help="column of the log with the users")] = None
    item_column: Annotated[str | None, typer.Option(help="column of the log with the items")] = None
    time_column: Annotated[str | None, typer.Option(help="column of the log with the times")] = None


def command_line(command_name: str, loaded_config: "LoadedConfig", command_options: Sequence[str] = ()) -> str:
    """Return the command line of a command on the same config, with its overrides, quoted for a shell.

    >>> from flows.settings.config_file import LoadedConfig
    >>> command_line("query", LoadedConfig(None, Path("my config.yaml"), ("workspace=b",)), ["-k", "10"])
    "nightjar query 'my config.yaml' --set workspace=b -k 10"
    """
    override_words = [word for override in loaded_config.overrides for word in ("--set", override)]
    return shlex.join(["nightjar", command_name, str(loaded_config.path), *override_words, *command_options])


def takes_config(command: Callable[..., None], *, prints_json: bool = False) -> Callable[..., None]:
    """Return a command with the argument FILE and the option --set, which `command` receives as ConfigOptions.

    With `prints_json`, the returned command also has the option --json.
    """

    def command_with_config(
        config_path: ConfigPath = DEFAULT_CONFIG_PATH, overrides: Overrides = None, as_json: AsJson = False, **options: Any
    ) -> None:
        command(ConfigOptions(config_path, tuple(overrides or ()), as_json), **options)

    *config_parameters, json_parameter, _ = signature(command_with_config).parameters.values()
    _, *command_parameters = signature(command).parameters.values()
    return _as_command(
        command_with_config, config_parameters + command_parameters + [json_parameter] * prints_json, help_from=command
    )


takes_config_and_json = partial(takes_config, prints_json=True)


def takes_inputs(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with an option for each field of InputOptions, which `command` receives as its first argument."""

    def command_with_inputs(**options: Any) -> None:
        inputs = {field.name: options.pop(field.name) for field in fields(InputOptions)}
        command(InputOptions(**inputs), **options)

    _, *command_parameters = signature(command).parameters.values()
    return _as_command(
        command_with_inputs, [*signature(InputOptions).parameters.values(), *command_parameters], help_from=command
    )


def _as_command(
    function: Callable[..., None], parameters: Sequence[Parameter], *, help_from: Callable[..., None]
) -> Callable[..., None]:
    """Return `function` with the attributes from which Typer reads the arguments, the options and the help."""
    keyword_parameters = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
    function.__signature__ = signature(help_from).replace(parameters=keyword_parameters)  # type: ignore[attr-defined]
    function.__name__, function.__doc__ = help_from.__name__, help_from.__doc__
    return function
