"""Arguments and options that several commands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flows.settings.config_file import LoadedConfig

DEFAULT_CONFIG_PATH = Path("nightly.yaml")
ConfigPath = Annotated[Path, typer.Argument(metavar="FILE", help="config file, written by `nightjar init`")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="replace a setting, e.g. training.epochs=3")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line of stdout")]
Verbose = Annotated[bool, typer.Option(help="also show Prefect's log")]


def read_config(config_path: Path, overrides: list[str] | None) -> "LoadedConfig":
    """Return the config that the arguments of a command name."""
    from flows.settings.config_file import LoadedConfig  # the help texts need no pydantic

    return LoadedConfig.read(config_path, overrides)
