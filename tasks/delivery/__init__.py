"""Delivery of a new champion to other systems: events, recommendations, and items in vector stores.

The modules in `__all__` import pyarrow, torch or FAISS. They are imported on first use.
"""

from typing import TYPE_CHECKING

from recsys_core.imports import lazy_modules

if TYPE_CHECKING:
    from tasks.delivery import item_columns, push, recommendations

__all__ = ["item_columns", "push", "recommendations"]
__getattr__ = lazy_modules(__name__, __all__)
