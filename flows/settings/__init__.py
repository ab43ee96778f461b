"""The settings of a pipeline: config models, config files, and the starter config of `nightjar init`.

The modules in `__all__` import pydantic or DuckDB. They are imported on first use, because help texts do not need them.
"""

from typing import TYPE_CHECKING

from recsys_core.imports import lazy_modules

if TYPE_CHECKING:
    from flows.settings import column_guesses, config_file

__all__ = ["column_guesses", "config_file"]
__getattr__ = lazy_modules(__name__, __all__)
