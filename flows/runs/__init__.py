"""Runs from the outside: their results, history, pages and metrics, and what happens before and after a run.

The modules in `__all__` import NumPy or DuckDB. They are imported on first use.
"""

from typing import TYPE_CHECKING

from recsys_core.imports import lazy_modules

if TYPE_CHECKING:
    from flows.runs import before_run, results, run_history

__all__ = ["before_run", "results", "run_history"]
__getattr__ = lazy_modules(__name__, __all__)
