"""Attributes of a package that are imported on their first use."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module-level `__getattr__` for `package`.

    Args:
        package: name of the package, for the error message.
        modules: public name -> module that defines it. These modules import Prefect, torch or FAISS, which takes seconds.
    """

    def get_attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(modules)}")
        return getattr(import_module(modules[name]), name)

    return get_attribute
