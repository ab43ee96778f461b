"""Arguments and options that several commands share."""

from collections.abc import Callable
from dataclasses import dataclass
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
    """The argument FILE and the options --set of a command."""

    path: Path
    overrides: tuple[str, ...] = ()

    def read(self) -> "LoadedConfig":
        """Return the config."""
        from flows.settings.config_file import LoadedConfig  # the help texts need no pydantic

        return LoadedConfig.read(self.path, self.overrides)

    def prepare(self) -> "LoadedConfig":
        """Return the config, and set the environment variables for Prefect and MLflow. Call before they are imported."""
        loaded = self.read()
        environment.prepare_environment(loaded.config.workspace)
        return loaded


def takes_config(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the argument FILE and the option --set, which `command` receives as ConfigOptions."""

    def command_with_config(config_path: ConfigPath = DEFAULT_CONFIG_PATH, overrides: Overrides = None, **options: Any) -> None:
        command(ConfigOptions(config_path, tuple(overrides or ())), **options)

    *config_parameters, _ = signature(command_with_config).parameters.values()
    _, *own_parameters = signature(command).parameters.values()
    keyword_parameters = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in own_parameters]
    # Typer reads the options from these attributes.
    parameters = [*config_parameters, *keyword_parameters]
    command_with_config.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    command_with_config.__annotations__ |= command.__annotations__
    command_with_config.__name__, command_with_config.__doc__ = command.__name__, command.__doc__
    return command_with_config
