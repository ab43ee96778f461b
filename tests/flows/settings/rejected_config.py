"""Error messages of config files."""

from pathlib import Path

import pytest

from flows.settings.config_file import load_config
from recsys_core.errors import InputError

VALID_CONFIG = "interactions: {paths: log/*.parquet, timestamp_column: ts}\n"


def error_message(config_path: Path, *overrides: str, text: str | None = None) -> str:
    """Return the error of loading the config file with these overrides. A `text` first replaces the content of the file."""
    if text is not None:
        config_path.write_text(text)
    with pytest.raises(InputError) as error_info:
        load_config(config_path, overrides)
    return str(error_info.value)
