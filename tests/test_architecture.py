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
"""For each folder of a package, the other folders of the package that it may import.

"" means the modules directly in the package, such as recsys_core.errors and flows.nightly. All folders of recsys_core and tasks
may import the modules directly in their package.
"""

MAX_MODULES = 12
"""Largest number of modules in a folder, without its `__init__.py` and `__main__.py`."""

CATCH_ALL_NAMES = {"utils", "helpers", "common", "misc", "util"}


def source_paths(*folders: str) -> list[Path]:
    """Return the paths of all Python files below the folders."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the dotted name of the module in `path`. An `__init__.py` has the name of its package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line number and dotted name of every import at any depth. `from a import b` yields a.b, which may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides where it goes; write the full name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imports_of(*folders: str) -> Iterator[tuple[str, str, str]]:
    """Yield the location (file:line), the importing module and the imported name of every import."""
    for path in source_paths(*folders):
        for line_number, name in imports_in(ast.parse(path.read_text())):
            yield f"{path.relative_to(ROOT)}:{line_number}", module_name(path), name


def folder_of(name: str) -> str:
    """Return the folder of a module in its package: dataset for recsys_core.dataset.events, "" for recsys_core.errors."""
    package, *names = name.split(".")
    return names[0] if names and (ROOT / package / names[0]).is_dir() else ""


def test_imports_inside_functions_are_found() -> None:
    tree = ast.parse("import flows\ndef f():\n    if True:\n        from tasks import run\n")
    assert list(imports_in(tree)) == [(1, "flows"), (4, "tasks.run")]


def test_flows_import_tasks_and_tasks_import_the_core_but_never_the_reverse() -> None:
    violations = [
        f"{location}: {module} imports {name}"
        for location, module, name in imports_of(*LAYERS)
        if name.split(".")[0] in LAYERS and LAYERS.index(name.split(".")[0]) > LAYERS.index(module.split(".")[0])
    ]
    assert violations == []


def test_the_core_imports_neither_orchestrator_nor_tracker() -> None:
    violations = [
        f"{location} imports {name}"
        for location, _, name in imports_of("recsys_core")
        if name.split(".")[0] in ("prefect", "mlflow")
    ]
    assert violations == []


def test_a_stage_imports_no_other_stage() -> None:
    shared_modules = {"tasks.stages.__init__", "tasks.stages.stage", "tasks.stages.model_stages"}
    stages = {f"tasks.stages.{path.stem}" for path in (ROOT / "tasks" / "stages").glob("*.py")} - shared_modules
    violations = [
        f"{location}: {module} imports {name}"
        for location, module, name in imports_of("tasks/stages")
        if module != "tasks.stages"
        and any(
            f"{name}.".startswith(f"{stage}.")
            for stage in stages - {module, "tasks.stages.__init__", "tasks.stages.model_stages"}
        )
    ]
    assert violations == []


def test_each_folder_imports_only_the_folders_it_may() -> None:
    violations = []
    for location, module, name in imports_of(*LAYERS):
        package = module.split(".")[0]
        is_package_module = module == package  # its __init__.py collects names for notebooks from all folders
        if not name.startswith(f"{package}.") or is_package_module:
            continue
        allowed = MAY_IMPORT[package][folder_of(module)] | {folder_of(module)} | ({""} if package != "flows" else set())
        if folder_of(name) not in allowed:
            violations.append(f"{location}: {module} imports {name}")
    assert violations == []


def test_only_the_engine_of_the_log_ingest_uses_duckdb() -> None:
    folder = ROOT / "recsys_core" / "ingest" / "log"
    engine_free_modules = {module_name(path) for path in [*folder.glob("*.py"), *source_paths("recsys_core/dataset")]}
    assert "recsys_core.ingest.log.incremental" in engine_free_modules
    violations = [
        f"{location} imports {name}"
        for location, module, name in imports_of("recsys_core/ingest/log", "recsys_core/dataset")
        if module in engine_free_modules and name.startswith(("duckdb", "recsys_core.parquet.duckdb_session"))
    ]
    assert violations == []


def test_no_folder_has_more_modules_than_the_limit() -> None:
    modules_by_folder: dict[Path, int] = {}
    for path in source_paths(*LAYERS):
        if not path.stem.startswith("__"):
            modules_by_folder[path.parent] = modules_by_folder.get(path.parent, 0) + 1
    assert {folder: count for folder, count in modules_by_folder.items() if count > MAX_MODULES} == {}


IMPORT_ALL = """
import importlib, sys

class ImportPrinter:
    def find_spec(self, name, path=None, target=None):
        if name in ("prefect", "mlflow"):
            frame, chain = sys._getframe(1), []
            while frame:
                importer = frame.f_globals.get("__name__", "")
                if not importer.startswith(("importlib", "_frozen")) and importer not in chain:
                    chain.append(importer)
                frame = frame.f_back
            print(name, "<-", " <- ".join(chain))

sys.meta_path.insert(0, ImportPrinter())
for module in sys.argv[1:]:
    importlib.import_module(module)
print("loaded:", *(name for name in ("prefect", "mlflow") if name in sys.modules))
"""


def import_all(modules: list[str], *, folder: Path) -> list[str]:
    """Import `modules` in a fresh interpreter.

    Return its output lines: the chain of importers for each import of prefect or mlflow, and then which of the two are loaded.
    """
    command = [sys.executable, "-c", IMPORT_ALL, *modules]
    process = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert process.returncode == 0, process.stderr
    return [line.strip() for line in process.stdout.splitlines()]


def test_importing_the_whole_core_loads_neither_prefect_nor_mlflow_even_indirectly() -> None:
    modules = [module_name(path) for path in source_paths("recsys_core")]
    if find_spec("pyspark") is None:  # pyspark is installed only with the extra `spark`
        modules = [name for name in modules if not name.startswith("recsys_core.ingest.log.spark_engine.")]
    assert {"recsys_core.manifests", "recsys_core.training.train", "recsys_core.training.__main__"} <= set(modules)
    assert import_all(modules, folder=ROOT) == ["loaded:"]


def test_the_check_names_the_module_that_imports_a_tracker(tmp_path: Path) -> None:
    (tmp_path / "mlflow.py").write_text("")
    (tmp_path / "between.py").write_text("import mlflow")
    (tmp_path / "outer.py").write_text("import between")
    assert import_all(["outer"], folder=tmp_path) == ["mlflow <- between <- outer <- __main__", "loaded: mlflow"]


@pytest.mark.parametrize(
    ("file", "code", "message"),
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
def test_ruff_reports_a_forbidden_import(file: str, code: str, message: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--no-cache", "--stdin-filename", file, "-"]
    process = subprocess.run(command, input=code + "\n", capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 1, process.stderr
    assert message in process.stdout


def test_no_module_has_a_catch_all_name() -> None:
    assert {path.stem for path in source_paths(*LAYERS, "tests", "infra")} & CATCH_ALL_NAMES == set()
