"""The tables and curves of results.json."""

from pathlib import Path
from typing import Any


def write_report(results: dict[str, Any], *, folder: Path) -> None:
    """report.md beside results.json."""
    (folder / "report.md").write_text("")
