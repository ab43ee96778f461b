"""Import directions between packages, read from the source so that imports inside functions count."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("recsys_core", "tasks", "flows")
"""Each package may import itself and the packages to its left."""

MAY_IMPORT = {
    "recsys_core": {
        "": set(),
        "manifests": set(),
        "patches": set(),
        "launching": set(),
        "comparison": {"evaluation"},
        "estimates": set(),
        "parquet": {"manifests"},
        "dataset": {"manifests"},
        "closed_form": {"manifests", "dataset"},
        "ingest": {"manifests", "parquet", "dataset", "closed_form"},
        "data_report": {"manifests", "parquet", "dataset", "ingest"},
        "models": {"manifests", "dataset"},
        "sharding": {"manifests", "dataset", "models", "patches"},
        "evaluation": {"manifests", "dataset", "models", "closed_form"},
        "training": {"manifests", "dataset", "models", "patches", "sharding", "launching", "evaluation", "closed_form"},
        "retrieval": {"manifests", "dataset"},
        "serving": {"manifests", "dataset", "models", "retrieval"},
        "refresh": {"manifests", "parquet", "dataset", "ingest", "models", "retrieval", "serving"},
        "http_server": {"serving"},
    },
    "tasks": {
        "": set(),
        "runs": set(),
        "progress": {"runs"},
        "delivery": {"progress"},
        "registry": {"runs", "delivery"},
        "gate": {"runs", "registry", "delivery"},
        "retention": {"runs", "registry"},
        "tuning": {"runs", "progress", "registry"},
        "stages": {"runs", "progress", "registry", "delivery", "gate"},
        "refresh": {"progress", "registry"},
        "serve": {"registry"},
    },
    "flows": {
        "settings": set(),
        "servers": {"settings"},
        "doctor": {"settings"},
        "runs": {"settings"},
        "": {"settings", "runs"},
        "scheduled": {"", "settings", "runs"},
        "cli": {"", "settings", "servers", "doctor", "runs", "scheduled"},
    },
}
"""Folders that each folder of a package may import, apart from itself and the modules directly in recsys_core and tasks.

"" means the modules directly in the package, such as recsys_core.errors and flows.nightly.
"""

MAX_MODULES = 12
"""Modules of a folder, without its __init__.py and __main__.py."""

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


def folder_of(name: str) -> str:
    """Return the first folder of a module in its package: dataset for recsys_core.dataset.events, "" for recsys_core.errors."""
    package, *parts = name.split(".")
    return parts[0] if parts and (ROOT / package / parts[0]).is_dir() else ""


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
    shared = {"tasks.stages.__init__", "tasks.stages.stage", "tasks.stages.model_stages"}
    stages = {f"tasks.stages.{path.stem}" for path in (ROOT / "tasks" / "stages").glob("*.py")} - shared
    wrong = [
        f"{place}: {module} imports {name}"
        for place, module, name in imports_of("tasks/stages")
        if module != "tasks.stages"
        and any(
            f"{name}.".startswith(f"{stage}.")
            for stage in stages - {module, "tasks.stages.__init__", "tasks.stages.model_stages"}
        )
    ]
    assert wrong == []


def test_each_folder_imports_only_the_folders_it_may() -> None:
    wrong = []
    for place, module, name in imports_of(*LAYERS):
        package = module.split(".")[0]
        is_door = module == package  # the names of a package for notebooks
        if not name.startswith(f"{package}.") or is_door:
            continue
        allowed = MAY_IMPORT[package][folder_of(module)] | {folder_of(module)} | ({""} if package != "flows" else set())
        if folder_of(name) not in allowed:
            wrong.append(f"{place}: {module} imports {name}")
    assert wrong == []


def test_only_the_engine_of_the_log_ingest_uses_duckdb() -> None:
    folder = ROOT / "recsys_core" / "ingest" / "log"
    neutral = {name_of(path) for path in [*folder.glob("*.py"), *sources("recsys_core/dataset")]}
    assert "recsys_core.ingest.log.incremental" in neutral
    wrong = [
        f"{place} imports {name}"
        for place, module, name in imports_of("recsys_core/ingest/log", "recsys_core/dataset")
        if module in neutral and name.startswith(("duckdb", "recsys_core.parquet.duckdb_session"))
    ]
    assert wrong == []


def test_no_folder_has_more_modules_than_a_reader_can_list() -> None:
    modules_by_folder: dict[Path, int] = {}
    for path in sources(*LAYERS):
        if not path.stem.startswith("__"):
            modules_by_folder[path.parent] = modules_by_folder.get(path.parent, 0) + 1
    assert {folder: count for folder, count in modules_by_folder.items() if count > MAX_MODULES} == {}


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
    if find_spec("pyspark") is None:  # an extra
        modules = [name for name in modules if not name.startswith("recsys_core.ingest.log.spark_engine.")]
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
            "recsys_core/dataset/x.py",
            "def f():\n    from mlflow import log_metric\n    return log_metric",
            "imports no experiment tracker",
        ),
        ("recsys_core/training/x.py", "from tasks.runs.run import Run", "never back"),
        ("tasks/x.py", "from flows.settings.pipeline import PipelineConfig", "never back"),
        ("tasks/stages/x.py", "from tasks.stages.model_stages import train", "a stage imports no other stage"),
        ("tasks/stages/x.py", "from tasks.stages import model_stages", "a stage imports no other stage"),
    ],
)
def test_ruff_reports_a_forbidden_import(file: str, line: str, reason: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--no-cache", "--stdin-filename", file, "-"]
    answer = subprocess.run(command, input=line + "\n", capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 1, answer.stderr
    assert reason in answer.stdout


def test_no_module_has_a_catch_all_name() -> None:
    assert {path.stem for path in sources(*LAYERS, "tests", "infra")} & NAMELESS == set()
