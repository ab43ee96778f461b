"""Imports of the modules that read and check a config."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "torchrec", "matplotlib", "prefect", "mlflow", "pandas", "faiss")


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("flows.settings.config_file", (*HEAVY, "numpy", "pyarrow", "duckdb")),
        ("flows.settings.template", HEAVY),
        ("flows.runs.before_run", HEAVY),
    ],
)
def test_reading_a_config_and_checking_its_input_imports_no_framework(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*(name for name in {heavy!r} if name in sys.modules))"
    root = Path(__file__).parents[3]
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert process.stdout.split() == []
