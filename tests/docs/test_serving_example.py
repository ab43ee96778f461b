"""The Python example in docs/serving.md runs on a small package."""

import re
from pathlib import Path

import pytest

from tests.recsys_core.serving.conftest import CONTEXT_FEATURES, ITEM_FILES, ITEM_IDS, USER_IDS, ModelBuilder
from tests.recsys_core.serving.conftest import build_packaged_model as build_packaged_model

PAGE_PATH = Path(__file__).resolve().parents[2] / "docs" / "serving.md"


def test_the_retriever_example_prints_two_answers_without_a_fallback(
    build_packaged_model: ModelBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    match = re.search(r"```python\n(from recsys_core import Retriever\n.*?)```", PAGE_PATH.read_text(), re.DOTALL)
    assert match is not None
    code = match[1]
    package_folder = str(build_packaged_model(features=CONTEXT_FEATURES, item_files=ITEM_FILES).package.folder)
    for old_text, new_text in {
        '"workspace/runs/20261125-060000-ab12/package"': repr(package_folder),
        "[42, 43]": repr(USER_IDS[:2]),
        "exclude=[12]": f"exclude=[{ITEM_IDS[12]!r}]",
        "[[7, 9, 3], [5]]": repr([ITEM_IDS[:3], ITEM_IDS[5:6]]),
        '{"device": ["ios", None]}': '{"single": ["context.single 2", None]}',
        "similar([7]": f"similar([{ITEM_IDS[7]!r}]",
    }.items():
        assert old_text in code
        code = code.replace(old_text, new_text)
    exec(code, {})  # noqa: S102
    printed_lines = capsys.readouterr().out.splitlines()
    assert len(printed_lines) == 2 and all(line.endswith("None") for line in printed_lines)
