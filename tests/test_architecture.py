"""Import directions between packages, read from the source code so that imports inside functions count too.

Other tests check the sizes of folders, the names of modules, and the shape letters of variables.
"""

import ast
import functools
import re
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
        "stages": {"runs", "progress", "registry", "delivery", "gate", "refresh"},
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
"""Folders that each folder of a package may import, in addition to itself.

"" means the modules directly in the package, such as recsys_core.errors and flows.nightly. All folders of recsys_core and tasks
may import these modules.
"""

MAX_MODULES = 12
"""Largest number of modules in a folder, without its __init__.py and __main__.py."""

CATCH_ALL_NAMES = {"utils", "helpers", "common", "misc", "util"}


def source_paths(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """Return the dotted name of a module, or of the package if the file is an __init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line number and the dotted name of every import; `from a import b` gives a.b, because b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides its target; write the full name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@functools.cache
def imports_of_file(path: Path) -> list[tuple[int, str]]:
    """Return the `imported_names` of a file. Cached, because several tests read the same files."""
    return list(imported_names(ast.parse(path.read_text())))


def imports_of_folders(*folders: str) -> Iterator[tuple[str, str, str]]:
    """Yield the location (file:line), the importing module and the imported name of every import."""
    for path in source_paths(*folders):
        for line_number, name in imports_of_file(path):
            yield f"{path.relative_to(ROOT)}:{line_number}", module_name(path), name


def folder_of(name: str) -> str:
    """Return the folder of a module below its package: dataset for recsys_core.dataset.events, "" for recsys_core.errors."""
    package, folder, *_ = [*name.split("."), ""]
    return folder if (ROOT / package / folder).is_dir() else ""


def test_imports_inside_functions_are_found() -> None:
    tree = ast.parse("import flows\ndef f():\n    if True:\n        from tasks import run\n")
    assert list(imported_names(tree)) == [(1, "flows"), (4, "tasks.run")]


def test_flows_import_tasks_and_tasks_import_the_core_but_never_the_reverse() -> None:
    violations = [
        f"{location}: {module} imports {name}"
        for location, module, name in imports_of_folders(*LAYERS)
        if name.split(".")[0] in LAYERS and LAYERS.index(name.split(".")[0]) > LAYERS.index(module.split(".")[0])
    ]
    assert violations == []


def test_the_core_imports_neither_orchestrator_nor_tracker() -> None:
    violations = [
        f"{location} imports {name}"
        for location, _, name in imports_of_folders("recsys_core")
        if name.split(".")[0] in ("prefect", "mlflow")
    ]
    assert violations == []


def test_a_stage_imports_no_other_stage() -> None:
    modules_without_stage = {"tasks.stages.__init__", "tasks.stages.stage", "tasks.stages.model_stages"}
    stage_modules = {f"tasks.stages.{path.stem}" for path in (ROOT / "tasks" / "stages").glob("*.py")} - modules_without_stage
    violations = [
        f"{location}: {module} imports {name}"
        for location, module, name in imports_of_folders("tasks/stages")
        if module != "tasks.stages"
        and any(f"{name}.".startswith(f"{stage_module}.") for stage_module in stage_modules - {module})
    ]
    assert violations == []


def test_each_folder_imports_only_the_folders_that_it_may_import() -> None:
    violations = []
    for location, module, name in imports_of_folders(*LAYERS):
        package = module.split(".")[0]
        is_package_init = module == package  # recsys_core/__init__.py offers names of all folders to notebooks
        if is_package_init or not name.startswith(f"{package}."):
            continue
        allowed_folders = MAY_IMPORT[package][folder_of(module)] | {folder_of(module)} | ({""} if package != "flows" else set())
        if folder_of(name) not in allowed_folders:
            violations.append(f"{location}: {module} imports {name}")
    assert violations == []


def test_only_the_engine_of_the_log_ingest_uses_duckdb() -> None:
    folder = ROOT / "recsys_core" / "ingest" / "log"
    modules_without_engine = {module_name(path) for path in [*folder.glob("*.py"), *source_paths("recsys_core/dataset")]}
    assert "recsys_core.ingest.log.incremental" in modules_without_engine
    violations = [
        f"{location} imports {name}"
        for location, module, name in imports_of_folders("recsys_core/ingest/log", "recsys_core/dataset")
        if module in modules_without_engine and name.startswith(("duckdb", "recsys_core.parquet.duckdb_session"))
    ]
    assert violations == []


def test_no_folder_has_more_than_twelve_modules() -> None:
    num_modules_by_folder: dict[Path, int] = {}
    for path in source_paths(*LAYERS):
        if not path.stem.startswith("__"):
            num_modules_by_folder[path.parent] = num_modules_by_folder.get(path.parent, 0) + 1
    assert {folder: count for folder, count in num_modules_by_folder.items() if count > MAX_MODULES} == {}


IMPORT_SCRIPT = """
import gc, importlib, sys

gc.disable()  # imports are faster without garbage collection

class ImportObserver:
    def find_spec(self, name, path=None, target=None):
        if name in ("prefect", "mlflow"):
            frame, importers = sys._getframe(1), []
            while frame:
                importer = frame.f_globals.get("__name__", "")
                if not importer.startswith(("importlib", "_frozen")) and importer not in importers:
                    importers.append(importer)
                frame = frame.f_back
            print(name, "<-", " <- ".join(importers))

sys.meta_path.insert(0, ImportObserver())
for module in sys.argv[1:]:
    importlib.import_module(module)
print("loaded:", *(name for name in ("prefect", "mlflow") if name in sys.modules))
"""


def import_all(modules: list[str], *, folder: Path) -> list[str]:
    """Import `modules` in a new interpreter. Return the output of IMPORT_SCRIPT: the imports of prefect and mlflow."""
    command = [sys.executable, "-c", IMPORT_SCRIPT, *modules]
    completed = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert completed.returncode == 0, completed.stderr
    return [line.strip() for line in completed.stdout.splitlines()]


def test_importing_the_whole_core_loads_neither_prefect_nor_mlflow_even_indirectly() -> None:
    modules = [module_name(path) for path in source_paths("recsys_core")]
    if find_spec("pyspark") is None:  # it is an optional dependency
        modules = [name for name in modules if not name.startswith("recsys_core.ingest.log.spark_engine.")]
    assert {"recsys_core.manifests", "recsys_core.training.train", "recsys_core.training.__main__"} <= set(modules)
    assert import_all(modules, folder=ROOT) == ["loaded:"]


def test_the_import_check_names_all_modules_of_the_chain_that_imports_a_tracker(tmp_path: Path) -> None:
    (tmp_path / "mlflow.py").write_text("")
    (tmp_path / "between.py").write_text("import mlflow")
    (tmp_path / "outer.py").write_text("import between")
    assert import_all(["outer"], folder=tmp_path) == ["mlflow <- between <- outer <- __main__", "loaded: mlflow"]


@pytest.mark.parametrize(
    ("path", "code", "reason"),
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
def test_ruff_reports_a_forbidden_import(path: str, code: str, reason: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--no-cache", "--stdin-filename", path, "-"]
    completed = subprocess.run(command, input=code + "\n", capture_output=True, text=True, cwd=ROOT)
    assert completed.returncode == 1, completed.stderr
    assert reason in completed.stdout


def test_no_module_has_a_catch_all_name() -> None:
    assert {path.stem for path in source_paths(*LAYERS, "tests", "infra")} & CATCH_ALL_NAMES == set()


def unexplained_shapes(node: ast.AST, explained_letters: frozenset[str] = frozenset()) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, letter, name) for each unexplained letter in the shape of a variable, argument or attribute.

    A letter is explained in the paragraph `Shapes:` of the module, or in brackets in the docstring of a class or function.
    """
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        pattern = r"^Shapes:.*?(?=\n\n|\Z)" if isinstance(node, ast.Module) else r"\[.*?\]"
        legends = re.findall(pattern, ast.get_docstring(node) or "", re.DOTALL | re.MULTILINE)
        explained_letters |= set(re.findall(r"\b[A-Z]\b", " ".join(legends)))
    if isinstance(node, ast.Name | ast.arg | ast.Attribute):
        name = next(getattr(node, field) for field in ("id", "arg", "attr") if hasattr(node, field))
        shape_match = re.search(r"[a-z0-9]_([A-Z]{1,4})$", name)
        if shape_match and not name.isupper():
            yield from ((node.lineno, letter, name) for letter in shape_match[1] if letter not in explained_letters)
    for child in ast.iter_child_nodes(node):
        yield from unexplained_shapes(child, explained_letters)


def test_a_docstring_explains_each_shape_letter_of_a_module() -> None:
    code = '"""Shapes: B queries."""\ndef f(x_BD):\n    """[D]"""\n    return x_BD\ny_BD, MAX_S = z.w_B, 1'
    assert list(unexplained_shapes(ast.parse(code))) == [(5, "D", "y_BD")]
    violations = [
        f"{path.relative_to(ROOT)}:{line_number}: the paragraph `Shapes:` does not explain the letter {letter} of {name}"
        for path in source_paths(*LAYERS)
        for line_number, letter, name in unexplained_shapes(ast.parse(path.read_text()))
    ]
    assert violations == []
