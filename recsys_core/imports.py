"""Imports on first use, and imports without garbage collection."""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


def lazy_attributes(package_name: str, module_by_name: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module-level `__getattr__` for a package.

    Args:
        package_name: name of the package, for the error message.
        module_by_name: the module that defines each public name. These modules import Prefect, torch or FAISS, which takes
            seconds.
    """

    def get_attribute(name: str) -> Any:
        if name not in module_by_name:
            raise AttributeError(f"module {package_name!r} has no attribute {name!r}; it has {', '.join(module_by_name)}")
        return getattr(import_module(module_by_name[name]), name)

    return get_attribute


def lazy_modules(package_name: str, module_names: Collection[str]) -> Callable[[str], ModuleType]:
    """Return a module-level `__getattr__` that imports the named modules of a package on first use."""

    def get_module(name: str) -> ModuleType:
        if name not in module_names:
            raise AttributeError(f"module {package_name!r} has no attribute {name!r}")
        with fast_imports():
            return import_module(f"{package_name}.{name}")

    return get_module


@contextmanager
def fast_imports() -> Iterator[None]:
    """Disable the garbage collector in the block, and exempt all objects that exist after the block from later collections.

    The import of a large library creates a million objects that live as long as the process. Collections during the import
    take a fifth of its CPU time, and every later collection would visit these objects.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
