"""Arguments and options that several commands share."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.settings import environment

if TYPE_CHECKING:
    from flows.settings.config_file import LoadedConfig

DEFAULT_CONFIG_PATH = Path("nightly.yaml")
ConfigPath = Annotated[Path, typer.Argument(metavar="FILE", help="config file, written by `nightjar init`")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="replace a setting, e.g. training.epochs=3")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line of stdout")]
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
        overrides = (f"{name}={json.dumps(value)}" for name, value in settings.items() if value is not None)
        return replace(self, overrides=(*self.overrides, *overrides))

    def read(self) -> "LoadedConfig":
        """Return the config."""
        from flows.settings.config_file import LoadedConfig  # imports pydantic, which the help texts do not need

        return LoadedConfig.read(self.path, self.overrides)

    def prepare(self) -> "LoadedConfig":
        """Return the config, and set the environment variables for Prefect and MLflow, which may not be imported before."""
        loaded = self.read()
        environment.prepare_environment(loaded.config.workspace)
        return loaded


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
    keyword_parameters = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in command_parameters]
    # Typer reads the options from these attributes.
    parameters = [*config_parameters, *keyword_parameters, *[json_parameter.replace(kind=Parameter.KEYWORD_ONLY)] * prints_json]
    command_with_config.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    command_with_config.__annotations__ |= command.__annotations__
    command_with_config.__name__, command_with_config.__doc__ = command.__name__, command.__doc__
    return command_with_config


takes_config_and_json = partial(takes_config, prints_json=True)
