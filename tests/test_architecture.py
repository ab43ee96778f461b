"""Import directions between packages, read from the source so that imports inside functions count."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("recsys_core", "tasks", "flows")
"""Each package may import itself and the packages to its left."""

CORE_MAY_IMPORT = {
    "": {""},
    "manifests": {"", "manifests"},
    "patches": {"", "patches"},
    "parquet": {"", "manifests", "parquet"},
    "data": {"", "manifests", "parquet", "data"},
    "data_report": {"", "manifests", "parquet", "data", "data_report"},
    "models": {"", "manifests", "data", "models"},
    "sharding": {"", "manifests", "data", "models", "patches", "sharding"},
    "launching": {"", "launching"},
    "evaluation": {"", "manifests", "data", "models", "evaluation"},
    "training": {"", "manifests", "data", "models", "patches", "sharding", "launching", "evaluation", "training"},
    "retrieval": {"", "manifests", "retrieval"},
    "serving": {"", "manifests", "data", "models", "retrieval", "serving"},
}
"""Packages that each package of recsys_core may import; "" means the modules directly in recsys_core, such as errors."""

NAMELESS = {"utils", "helpers", "common", "misc", "util"}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """Return the dotted name of a module; of its package for an __init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_by(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every import at any depth; `from a import b` gives a.b, which may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides where it goes; write the full name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imports_of(*folders: str) -> Iterator[tuple[str, str, str]]:
    """Yield location (file:line), importing module and imported name of every import."""
    for path in sources(*folders):
        for line, name in imported_by(ast.parse(path.read_text())):
            yield f"{path.relative_to(ROOT)}:{line}", name_of(path), name


def core_folder(name: str) -> str:
    """Return the folder of a core module: data for recsys_core.data.events, "" for recsys_core.errors and recsys_core."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and (ROOT / "recsys_core" / parts[1]).is_dir() else ""


def test_imports_inside_functions_are_found() -> None:
    tree = ast.parse("import flows\ndef f():\n    if True:\n        from tasks import run\n")
    assert list(imported_by(tree)) == [(1, "flows"), (4, "tasks.run")]


def test_flows_import_tasks_and_tasks_import_the_core_but_never_the_reverse() -> None:
    wrong = [
        f"{place}: {module} imports {name}"
        for place, module, name in imports_of(*LAYERS)
        if name.split(".")[0] in LAYERS and LAYERS.index(name.split(".")[0]) > LAYERS.index(module.split(".")[0])
    ]
    assert wrong == []


def test_the_core_imports_neither_orchestrator_nor_tracker() -> None:
    wrong = [
        f"{place} imports {name}" for place, _, name in imports_of("recsys_core") if name.split(".")[0] in ("prefect", "mlflow")
    ]
    assert wrong == []


def test_a_stage_imports_no_other_stage() -> None:
    stages = {path.stem for path in (ROOT / "tasks").glob("*.py")} - {
        "__init__",
        "artifacts",
        "events",
        "reporting",
        "run",
        "run_record",
        "stage",
    }
    wrong = []
    for place, module, name in imports_of("tasks"):
        own, other = module.split(".")[1:2], name.split(".")[1:2]
        if name.startswith("tasks.") and other != own and set(other) <= stages:
            wrong.append(f"{place}: {module} imports {name}")
    assert wrong == []


def test_each_folder_of_the_core_imports_only_the_folders_it_may() -> None:
    wrong = [
        f"{place}: {module} imports {name}"
        for place, module, name in imports_of("recsys_core")
        if name.startswith("recsys_core.")
        and core_folder(name) not in CORE_MAY_IMPORT[core_folder(module)]
        and module != "recsys_core"  # its names for notebooks
    ]
    assert wrong == []


IMPORT_ALL = """
import importlib, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("prefect", "mlflow"):
            frame, chain = sys._getframe(1), []
            while frame:
                importer = frame.f_globals.get("__name__", "")
                if not importer.startswith(("importlib", "_frozen")) and importer not in chain:
                    chain.append(importer)
                frame = frame.f_back
            print(name, "<-", " <- ".join(chain))

sys.meta_path.insert(0, Watch())
for module in sys.argv[1:]:
    importlib.import_module(module)
print("loaded:", *(name for name in ("prefect", "mlflow") if name in sys.modules))
"""


def import_all(modules: list[str], *, folder: Path) -> list[str]:
    """Import `modules` in a fresh interpreter; return its lines: importers of prefect or mlflow, and which is loaded."""
    command = [sys.executable, "-c", IMPORT_ALL, *modules]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert answer.returncode == 0, answer.stderr
    return [line.strip() for line in answer.stdout.splitlines()]


def test_importing_the_whole_core_loads_neither_prefect_nor_mlflow_even_indirectly() -> None:
    modules = [name_of(path) for path in sources("recsys_core")]
    assert {"recsys_core.manifests", "recsys_core.training.train", "recsys_core.training.__main__"} <= set(modules)
    assert import_all(modules, folder=ROOT) == ["loaded:"]


def test_the_check_names_the_module_that_imports_a_tracker(tmp_path: Path) -> None:
    (tmp_path / "mlflow.py").write_text("")
    (tmp_path / "between.py").write_text("import mlflow")
    (tmp_path / "outer.py").write_text("import between")
    assert import_all(["outer"], folder=tmp_path) == ["mlflow <- between <- outer <- __main__", "loaded: mlflow"]


@pytest.mark.parametrize(
    ("file", "line", "reason"),
    [
        ("recsys_core/x.py", "import prefect", "imports no orchestrator"),
        (
            "recsys_core/data/x.py",
            "def f():\n    from mlflow import log_metric\n    return log_metric",
            "imports no experiment tracker",
        ),
        ("recsys_core/training/x.py", "from tasks.run import Run", "never back"),
        ("tasks/x.py", "from flows.config import PipelineConfig", "never back"),
        ("tasks/x.py", "from tasks.train import train", "a task imports no other stage"),
        ("tasks/x.py", "from tasks import evaluate", "a task imports no other stage"),
    ],
)
def test_ruff_reports_a_forbidden_import(file: str, line: str, reason: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--no-cache", "--stdin-filename", file, "-"]
    answer = subprocess.run(command, input=line + "\n", capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 1, answer.stderr
    assert reason in answer.stdout


def test_no_module_has_a_catch_all_name() -> None:
    assert {path.stem for path in sources(*LAYERS, "tests", "infra")} & NAMELESS == set()
