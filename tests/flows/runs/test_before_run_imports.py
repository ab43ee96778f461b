"""Imports of the module that checks a config and its input."""

import subprocess
import sys
from pathlib import Path

FRAMEWORKS = ("torch", "torchrec", "matplotlib", "prefect", "mlflow", "pandas", "faiss")


def test_checking_a_config_and_its_input_imports_no_framework() -> None:
    """The import also executes the `__init__.py` of flows and of recsys_core."""
    code = f"import sys, flows.runs.before_run, recsys_core; print(*(name for name in {FRAMEWORKS} if name in sys.modules))"
    root = Path(__file__).parents[3]
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert process.stdout.split() == []
