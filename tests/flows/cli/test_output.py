"""Terminal output at a width of 80 columns."""

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from flows.cli import output
from flows.cli.commands.run import print_metrics
from recsys_core.evaluation.report import metric_table
from tasks.progress.reporting import LOG, show_bar

WIDTH = 80
STAGE_FACTS = (
    "41,235 steps, loss 2.3456, 123,456 samples/s, stopped early after epoch 5 of 10, best epoch 2: validation ndcg@10 0.0611"
)


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A console of 80 columns that receives stdout and stderr."""
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    monkeypatch.setattr(output, "stderr", console)
    monkeypatch.setattr(output, "stdout", console)
    return console


def printed_lines(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return [line for line in console.file.getvalue().splitlines() if line]


def test_a_stage_is_one_line_and_a_warning_is_folded_between_words(console: Console) -> None:
    with output.printed_stages():
        LOG.info("one line for Prefect", extra={"stage_line": ("train", STAGE_FACTS, "1,234.5 s")})
        LOG.warning("a warning of %s", "words " * 30)
    lines = printed_lines(console)
    assert all(len(line) <= WIDTH for line in lines)
    assert lines[0].split() == ["train", "41,235", "steps,", "loss", "2.3456,", "123,456", "samples/s", "1,234.5", "s"]
    assert " ".join(lines[1:]).count("words") == 30


def test_a_stage_line_in_a_file_is_one_line(monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    monkeypatch.setattr(output, "stderr", Console(file=console.file, width=output.UNFOLDED_WIDTH))
    with output.printed_stages():
        LOG.info("one line", extra={"stage_line": ("train", STAGE_FACTS, "1.5 s")})
    (line,) = printed_lines(console)
    assert line.split() == ["train", *STAGE_FACTS.split(), "1.5", "s"]


def test_the_progress_bar_shows_the_stage_and_its_progress(monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    bar_console = Console(file=io.StringIO(), width=WIDTH, force_terminal=True)
    monkeypatch.setattr(output, "stderr", bar_console)
    with output.printed_stages():
        logging.getLogger("nightjar.steps").debug("evaluate", extra={"stage": "evaluate"})
        show_bar("evaluate", num_done=3_000, num_total=30_000, note="3,000 of 30,000 queries")
    text = "".join(printed_lines(bar_console))
    assert "evaluate" in text and "3,000 of 30,000 queries" in text


def test_the_table_of_metrics_fits_and_has_rows_for_cold_items_and_served_versions(console: Console) -> None:
    metric_names = ("recall@20", "ndcg@10", "hit_rate@10", "mrr", "auc", "coverage@20")
    metrics = {
        f"{prefix}/{name}": 0.1234 for prefix in ("test", "baseline/popularity", "baseline/zero_shot") for name in metric_names
    }
    metrics |= {f"{prefix}/cold/recall@20": 0.5 for prefix in ("test", "baseline/zero_shot")}
    table = metric_table(metrics | {"test/cold/items": 312, "test/cold/users": 45})
    served_metrics = {
        f"{version}/{name}": 0.1 for version in ("served", "former_champion") for name in ("recall@20", "ndcg@20")
    }
    print_metrics(table, served_metrics=served_metrics)
    lines = printed_lines(console)
    assert len(lines) == 1 + 3 + 2 + 2 + 1  # titles, rankers, rankers on cold items, served versions, note
    assert all(len(line) <= WIDTH for line in lines)
    assert lines[-1].strip() == "cold: 312 items without an earlier event, for 45 users"


HISTORY_TITLES = ["run (UTC)", "ended as", "version", "recall@20", "champion", "test users", "items", "duration", "reason"]
HISTORY_ROW = ["20261026-021500-001a", "not promoted", "12", "0.1234", "0.1250", "1.23 k", "25.4 k", "44 min", "reason " * 20]


def test_a_narrow_terminal_cuts_no_id_and_no_number(console: Console) -> None:
    output.print_table(HISTORY_TITLES, [HISTORY_ROW])
    words = " ".join(printed_lines(console)).split()
    assert all(cell in " ".join(words) for cell in HISTORY_ROW[:-1]) and words.count("reason") == 20 + 1  # and the title
    assert not any("…" in word for word in words)


def test_a_table_with_one_long_text_fits_into_a_narrow_terminal(console: Console) -> None:
    output.print_table(["setting", "why"], [["model.temperature", "a word " * 30]], left_columns=(0, 1))
    lines = printed_lines(console)
    assert len(lines) > 3 and all(len(line) <= WIDTH for line in lines)


def test_a_table_with_one_long_text_fits_into_a_wide_terminal(monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    width = output.UNFOLDED_WIDTH + 40
    monkeypatch.setattr(output, "stdout", Console(file=console.file, width=width, force_terminal=True, color_system=None))
    output.print_table(HISTORY_TITLES, [[*HISTORY_ROW[:-1], "reason " * 60]])
    assert all(len(line) <= width for line in printed_lines(console))


def test_a_row_of_a_table_in_a_file_is_one_line(monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    monkeypatch.setattr(output, "stdout", Console(file=console.file, width=output.UNFOLDED_WIDTH))
    output.print_table(HISTORY_TITLES, [HISTORY_ROW])
    title_line, row_line = printed_lines(console)
    assert title_line.split() == " ".join(HISTORY_TITLES).split() and row_line.split() == " ".join(HISTORY_ROW).split()


def test_control_characters_of_ids_are_escaped_and_a_newline_does_not_make_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "stdout", Console(file=sys.stdout, width=200))
    hostile_text = "a\x1b]0;title\x07\x1b[31m\nb\u202e"
    output.print_table(["item", "score"], [[hostile_text, "0.5"]])
    output.print_labelled({"item": hostile_text})
    printed_text = capsys.readouterr().out
    assert "\x1b" not in printed_text and "\x07" not in printed_text and "\u202e" not in printed_text
    assert len(printed_text.splitlines()) == 4 and r"a\x1b]0;title\x07\x1b[31m\nb\u202e" in printed_text


def test_control_characters_of_warnings_and_labelled_texts_are_escaped_except_newlines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile_text = "a\x1b]0;title\x07\nb\u202e"
    for stream in ("stderr", "stdout"):
        monkeypatch.setattr(output, stream, Console(file=sys.stdout, width=200))
    output.print_warning(hostile_text)
    output.print_labelled({"log": hostile_text}, status_by_label={"log": "[red]problem[/]"})
    with output.printed_stages():
        logging.getLogger("nightjar").info("read %s", hostile_text)
    printed_text = capsys.readouterr().out
    assert "\x1b]0" not in printed_text and "\x07" not in printed_text and "\u202e" not in printed_text
    assert printed_text.count(r"a\x1b]0;title\x07") == 3 and printed_text.count("\nb") == 3


def test_control_characters_of_a_printed_line_are_escaped(console: Console) -> None:
    output.print_line("nightly\x1b[31m\x85.yaml: OK\n[b]")
    assert printed_lines(console) == [r"nightly\x1b[31m\x85.yaml: OK", "[b]"]


@pytest.mark.parametrize("closed_streams", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_the_null_device_and_no_file_gets_their_descriptor(tmp_path: Path, closed_streams: str) -> None:
    result_path = tmp_path / "result.txt"
    python_code = (
        "import sys; from flows.cli import output; output.print_line('text'); opened = open(sys.argv[1], 'w'); print('opened')"
    )
    python_code += "; print(opened.fileno(), sys.stdin.read(), file=opened)"
    shell_script = f'exec "$0" -c "$1" "$2" {closed_streams}'
    subprocess.run(
        ["bash", "-c", shell_script, sys.executable, python_code, str(result_path)], check=True, input=b"", timeout=60
    )
    assert int(result_path.read_text()) >= 3
