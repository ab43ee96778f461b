"""Checks of the documentation: YAML blocks are valid, and the commands, options, settings and links in the text exist."""

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.main import get_command

from flows.cli.main import app
from flows.settings import yaml_loader
from flows.settings.config_errors import setting_keys
from flows.settings.config_file import load_config
from flows.settings.pipeline import PipelineConfig
from infra.config_reference import PAGE_PATH, reference_page

ROOT = Path(__file__).resolve().parents[2]
PAGE_PATHS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / "infra").glob("*.md"),
]
BASE_CONFIG = {
    "interactions": {"paths": "log.parquet", "timestamp_column": "timestamp"},
    "embeddings": {"paths": "vectors.parquet", "vector_column": "vector"},
    "features": {"context": [{"name": "device"}]},
    "model": {"learn_user_embedding": True},
}
"""Settings that the YAML blocks of the documentation leave out."""
SETTING_KEYS = set(setting_keys(PipelineConfig))
SETTING_GROUPS = {key.partition(".")[0] for key in SETTING_KEYS}
ROOT_COMMAND = get_command(app)


def code_blocks(language: str) -> list[Any]:
    """Return the code blocks of the pages as test parameters."""
    pattern = re.compile(rf"^( *)```{language}\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
    return [
        pytest.param(match[2], id=f"{page_path.relative_to(ROOT)}-{block_index}")
        for page_path in PAGE_PATHS
        for block_index, match in enumerate(pattern.finditer(page_path.read_text(encoding="utf-8")))
    ]


def commands() -> Iterator[Any]:
    """Yield the `nightjar` commands of the pages as test parameters."""
    for page_path in PAGE_PATHS:
        for line_number, line in enumerate(page_path.read_text(encoding="utf-8").splitlines(), start=1):
            code_texts = [line] if line.startswith("    ") else re.findall(r"`([^`]+)`", line)
            for code_text in code_texts:
                match = re.match(r"\s*(?:\$ )?(nightjar [a-z].*)", code_text)
                if match:
                    yield pytest.param(match[1].partition("  #")[0], id=f"{page_path.relative_to(ROOT)}:{line_number}")


def named_settings() -> Iterator[Any]:
    """Yield the dotted names of settings on the pages as test parameters."""
    for page_path in PAGE_PATHS:
        if page_path == PAGE_PATH or page_path.parent.name == "adr":
            continue
        for line_number, line in enumerate(page_path.read_text(encoding="utf-8").splitlines(), start=1):
            for code_text in re.findall(r"`([^`]+)`", line):
                setting_name = code_text.partition(":")[0].removeprefix("--set ").partition("=")[0].strip()
                is_dotted = re.fullmatch(r"[a-z_]+(\.(<name>|[a-z_]+|\"[a-z_.]+\"))+", setting_name) is not None
                if is_dotted and setting_name.partition(".")[0] in SETTING_GROUPS and not setting_name.endswith(".json"):
                    yield pytest.param(setting_name, id=f"{page_path.relative_to(ROOT)}:{line_number}-{setting_name}")


def merged(base: Any, update: Any) -> Any:
    """Return `base` with the values of `update`; dictionaries are merged at every level."""
    if not isinstance(base, dict) or not isinstance(update, dict):
        return update
    return {**base, **{name: merged(base.get(name), value) for name, value in update.items()}}


@pytest.mark.parametrize("block", [*code_blocks("yaml")])
def test_a_yaml_block_of_the_documentation_is_a_valid_config(block: str, tmp_path: Path) -> None:
    settings = merged(BASE_CONFIG, YAML(typ="safe", pure=True).load(block))
    (tmp_path / "nightly.yaml").write_text(yaml_loader.dump(settings))
    assert load_config(tmp_path / "nightly.yaml").model_fields_set >= settings.keys()


@pytest.mark.parametrize("block", [*code_blocks("python")])
def test_a_python_block_of_the_documentation_compiles_and_imports_names_that_exist(block: str) -> None:
    tree = ast.parse(textwrap.dedent(block))
    compile(tree, "documentation", "exec")
    missing_names = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in ("recsys_core", "tasks", "flows")
        for alias in node.names
        if not hasattr(import_module(str(node.module)), alias.name)
    ]
    assert missing_names == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_an_example_is_a_valid_config_with_the_name_of_its_file(path: Path) -> None:
    assert load_config(path).name == path.stem.replace("_", "-")


@pytest.mark.parametrize("command", [*commands()])
def test_a_command_of_the_documentation_exists_with_its_options(command: str) -> None:
    subcommand_name, *arguments = shlex.split(command)[1:]
    subcommand = ROOT_COMMAND.commands.get(subcommand_name)  # type: ignore[attr-defined]
    assert subcommand is not None, f"nightjar {subcommand_name} does not exist"
    known_options = {option for parameter in subcommand.params for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown_options = [
        argument for argument in arguments if argument.startswith("-") and argument.partition("=")[0] not in known_options
    ]
    assert not unknown_options, f"nightjar {subcommand_name} has no {unknown_options}; it has {sorted(known_options)}"


@pytest.mark.parametrize("setting_name", [*named_settings()])
def test_a_setting_named_in_the_documentation_exists(setting_name: str) -> None:
    key_pattern = re.sub(r"<name>|\"[a-z_.]+\"", "*", setting_name)
    assert any(
        fnmatchcase(key_pattern, setting_key) or fnmatchcase(setting_key, key_pattern) for setting_key in SETTING_KEYS
    ), setting_name


def test_the_config_reference_is_current() -> None:
    assert PAGE_PATH.read_text(encoding="utf-8") == reference_page(), "run make docs"


def test_the_config_reference_describes_each_class_once_and_links_to_it_elsewhere() -> None:
    section_by_title = dict(section.split("\n", 1) for section in re.split(r"^#+ ", reference_page(), flags=re.MULTILINE)[1:])
    assert "| `skip_connection` | `true` |" in section_by_title["`model.query`"]
    assert (
        section_by_title["`model.candidate`"]
        .strip()
        .endswith("The settings are those of [`model.query`](#modelquery), with other defaults: `skip_connection` is `false`.")
    )
    assert "| `max_user_events` | no limit |" in section_by_title["`interactions.filter`"]
    assert "those of [`features.users.features`](#featuresusersfeatures)" in section_by_title["`features.items.features`"]
    setting_rows = [line for line in reference_page().splitlines() if line.startswith("| `")]
    num_repeated_rows = len(setting_rows) - len(set(setting_rows))  # a setting such as `paths` has equal rows in several tables
    assert num_repeated_rows <= 6


def test_every_link_of_the_documentation_leads_to_a_file_and_heading() -> None:
    broken_links = []
    for page_path in PAGE_PATHS:
        for link_target in re.findall(r"\]\((?!https?:)([^)\s]*)\)", page_path.read_text(encoding="utf-8")):
            relative_path, _, anchor = link_target.partition("#")
            target_path = (page_path.parent / relative_path).resolve() if relative_path else page_path
            if not target_path.exists() or (anchor and anchor not in anchors(target_path)):
                broken_links.append(f"{page_path.relative_to(ROOT)}: {link_target}")
    assert broken_links == []


def anchors(page_path: Path) -> set[str]:
    """Return the link targets of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page_path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
