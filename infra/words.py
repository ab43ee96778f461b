"""Check for words that neither prose nor names may contain: `make words`.

The script reads the tracked files and prints path and line of each forbidden word.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ("*.py", "*.md", "*.yaml", "*.html", "*.toml", "Makefile", "*.sh")
EXEMPT_FILES = ("infra/words.py", "tests/infra/test_words.py")

ADVICE_BY_WORD = {
    r"tonights?": "this run",
    r"last nights?": "the previous run",
    r"(?<!every[ -])nights?": "run",
    r"anew": "again, from scratch",
    r"mend(s|ed|ing)?": "fix",
    r"beside": "next to, compared with",
    r"told": "a plain verb or noun",
    r"wish(es)?": "constraint, requested value",
    r"rubbish": "stale",
    r"seldom": "rarely",
    r"somebody|nobody": "name the person or the process",
    r"(goes|go|went) on": "continue, resume",
    r"stands": "is",
    r"lies": "is",
    r"all the same": "still, nevertheless",
    r"has not(?= (a|an|any|the|its|it|this|these)\b)": "does not have",
    r"papers": "files",
    r"(?<!partial )sums(?! of)": "accumulator, totals",
    r"row by row": "unpooled",
    r"what [^.:;|`]{0,40}\b(asks|tells|wants|knows)": "name the thing instead of a clause",
    r"(would|or|must|but|,|;) else(?! (if|:))": "otherwise",
}
"""What to write instead of each forbidden word, a regular expression. An underscore ends a word, so names are checked too."""

ALLOWED_BY_PATH = {
    "README.md": r"every night",
    "flows/nightly.py": r"nightly",
}
"""Regular expression of the text that is allowed in a file."""


class Finding(NamedTuple):
    """A forbidden word in a file."""

    path: str
    line_number: int
    word: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line_number}: {self.word!r}; write: {self.advice}"


_WORD_PATTERNS = [
    (re.compile(rf"(?<![A-Za-z])(?:{word})(?![A-Za-z])", re.IGNORECASE), advice) for word, advice in ADVICE_BY_WORD.items()
]
_ELSE_IN_CODE = re.compile(r"\belse\b(?=\s*:|\s+[\w(\[{\"'-])")


def findings_in(path: str, text: str) -> Iterator[Finding]:
    """Yield the forbidden words of one file.

    >>> [str(finding) for finding in findings_in("a.py", "def f():\\n    return told_E\\n")]
    ["a.py:2: 'told'; write: a plain verb or noun"]
    """
    allowed = ALLOWED_BY_PATH.get(path)
    for line_number, line in enumerate(text.splitlines(), start=1):
        prose = re.sub(allowed, "", line) if allowed else line
        if path.endswith(".py") and "#" not in prose and '"' not in prose:
            prose = _ELSE_IN_CODE.sub("", prose)
        for pattern, advice in _WORD_PATTERNS:
            for match in pattern.finditer(prose):
                yield Finding(path, line_number, match.group().strip(), advice)


def tracked_files() -> list[str]:
    """Return the paths of all files that the check reads."""
    command = ["git", "ls-files", "-z", "--", *PATTERNS]
    git_output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for path in git_output.stdout.split("\0") if path and path not in EXEMPT_FILES and (ROOT / path).is_file()]


def main() -> int:
    """Print all findings and return the exit code."""
    findings = [finding for path in tracked_files() for finding in findings_in(path, (ROOT / path).read_text(encoding="utf-8"))]
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    if findings:
        sys.stderr.write(f"{len(findings)} forbidden words; CONTRIBUTING.md has the rules of the language\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
