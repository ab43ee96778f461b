"""The process of the embedded Prefect server."""

import inspect
import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from flows.servers import prefect_process

DISTRIBUTION_OF = {"docket": "pydocket"}


@pytest.mark.parametrize("python_version", ["3.11", "3.12", "3.13"])
def test_the_libraries_that_are_imported_before_prefect_are_required_by_it_on_every_python(python_version: str) -> None:
    modules = re.findall(r"^    import (\w+)", inspect.getsource(prefect_process._import_libraries), re.MULTILINE)
    environment = {"python_version": python_version, "python_full_version": f"{python_version}.0", "extra": ""}
    required = {
        requirement.name
        for requirement in map(Requirement, metadata.requires("prefect") or ())
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }
    assert modules and {DISTRIBUTION_OF.get(module, module) for module in modules} <= required
