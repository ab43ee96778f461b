"""The check for forbidden words."""

import subprocess
import sys
from pathlib import Path

import pytest

from infra.words import ADVICE_BY_WORD, ROOT, findings_in


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("docs/a.md", "Everything starts anew."),
        ("docs/a.md", "Data of last night"),
        ("recsys_core/a.py", "full_disk_is_told(path)"),
        ("recsys_core/a.py", "# a table that has not any row"),
        ("recsys_core/a.py", '"""Stop, or else."""'),
        ("nightly.yaml", "# the ids go row by row"),
        ("Makefile", "## a second night"),
    ],
)
def test_a_forbidden_word_is_reported_in_prose_and_names(path: str, line: str) -> None:
    (finding, *_) = findings_in(path, f"first line\n{line}\n")
    assert (finding.path, finding.line_number) == (path, 2)
    assert str(finding).startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    "line",
    [
        "    return 1 if found else (0, 1)",
        "else:",
        "# the recommender amends nothing and has not been started",
        "retrains every night",
        "nightjar runs nightly.yaml",
        "partial sums of the rows, and sums of squares",
    ],
)
def test_code_similar_words_and_allowed_uses_are_not_reported(line: str) -> None:
    assert list(findings_in("recsys_core/a.py", line)) == []


def test_the_check_exits_with_1_when_a_tracked_file_has_a_forbidden_word(tmp_path: Path) -> None:
    for folder in ("infra", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "infra" / "words.py").write_text((ROOT / "infra" / "words.py").read_text())
    page = tmp_path / "docs" / "page.md"
    page.write_text("A run continues.\n")
    for git_command in (["git", "init", "--quiet"], ["git", "add", "."]):
        subprocess.run(git_command, cwd=tmp_path, check=True)
    command = [sys.executable, str(tmp_path / "infra" / "words.py")]
    assert subprocess.run(command, capture_output=True).returncode == 0
    page.write_text("A run continues.\nA run goes on.\n")
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stdout.startswith("docs/page.md:2: 'goes on'; write: ")


def test_every_forbidden_word_has_a_replacement() -> None:
    assert all(ADVICE_BY_WORD.values())
