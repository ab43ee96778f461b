"""The `nightjar` command: exit codes, stdout and stderr."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from flows.cli import main as cli
from flows.cli.commands import run
from flows.settings.config_file import load_config
from recsys_core.errors import InputError


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    random_generator = np.random.default_rng(0)
    log_columns = {
        "user_id": random_generator.integers(0, 9, 100),
        "item_id": random_generator.integers(0, 20, 100),
        "timestamp": np.arange(100) * 3600,
    }
    pq.write_table(pa.table(log_columns), tmp_path / "log.parquet")
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(random_generator.normal(size=160).astype(np.float32)), 8)
    pq.write_table(pa.table({"item_id": np.arange(20), "embedding": vectors}), tmp_path / "vectors.parquet")
    path = tmp_path / "nightly.yaml"
    path.write_text(
        "interactions: {paths: log.parquet, timestamp_column: timestamp}\n"
        "embeddings: {paths: vectors.parquet, vector_column: embedding}\n"
        "model: {embedding_dim: 8}\n"
    )
    return path


def nightjar(*arguments: str | Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run `nightjar ARGUMENTS` and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["nightjar", *map(str, arguments)])
    monkeypatch.setattr(cli, "silence_libraries", lambda: None)  # this process belongs to pytest
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    return int(exit_info.value.code or 0)


def test_the_help_lists_every_command_and_each_command_has_an_example() -> None:
    help_text = CliRunner().invoke(cli.app, ["--help"]).output
    for command in cli.app.registered_commands:
        assert command.callback is not None and command.epilog, command
        assert f" {command.name or command.callback.__name__} " in help_text


SCRIPT_OF_LIGHT_COMMANDS = """
import sys
from flows.cli.main import main

HEAVY_LIBRARIES = {"torch", "torchrec", "matplotlib", "mlflow", "prefect", "pandas", "pyarrow", "duckdb", "numpy", "faiss"}
for arguments in (["--help"], ["init", "new.yaml"], ["validate", "absent.yaml"], ["history", "absent.yaml"]):
    sys.argv = ["nightjar", *arguments]
    try:
        main()
    except SystemExit as end:
        print("after", arguments[0], end.code or 0, *sorted(HEAVY_LIBRARIES & sys.modules.keys()))
"""


def test_a_command_that_reads_no_data_imports_no_heavy_library(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT_OF_LIGHT_COMMANDS], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("after ")]
    assert lines == ["after --help 0", "after init 0", "after validate 2", "after history 2"], process.stderr


def test_init_writes_a_config_and_does_not_overwrite_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    assert nightjar("init", path, monkeypatch=monkeypatch) == 0
    load_config(path)
    path.write_text("kept")
    assert nightjar("init", path, monkeypatch=monkeypatch) == 2
    assert path.read_text() == "kept"


def test_the_next_command_quotes_a_path_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my config.yaml"
    assert nightjar("validate", path, monkeypatch=monkeypatch) == 2
    assert f"`nightjar init '{path}'` writes one" in capsys.readouterr().err
    assert nightjar("init", path, monkeypatch=monkeypatch) == 0
    assert f"nightjar validate '{path}'" in capsys.readouterr().out


def test_init_marks_the_columns_that_it_cannot_guess_and_takes_them_as_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log_path, config_path = tmp_path / "log.parquet", tmp_path / "a.yaml"
    event_numbers = np.arange(1_000)
    pq.write_table(pa.table({"a": event_numbers % 90, "b": event_numbers % 70, "ts": 1_700_000_000 + event_numbers}), log_path)
    assert nightjar("init", config_path, "--log", log_path, monkeypatch=monkeypatch) == 0
    next_step = "fill in interactions.user_column and interactions.item_column, then: nightjar validate"
    assert f"wrote {config_path}; {next_step} {config_path}" in capsys.readouterr().out
    assert nightjar("validate", config_path, monkeypatch=monkeypatch) == 2
    assert "no column '<column of the users>' (interactions.user_column)" in capsys.readouterr().err
    column_options = ["--user-column", "a", "--item-column", "b"]
    assert nightjar("init", tmp_path / "b.yaml", "--log", log_path, *column_options, monkeypatch=monkeypatch) == 0
    assert nightjar("validate", tmp_path / "b.yaml", monkeypatch=monkeypatch) == 0
    assert nightjar("init", tmp_path / "c.yaml", *column_options, monkeypatch=monkeypatch) == 2
    assert "are about the log; add --log" in capsys.readouterr().err


def test_validate_accepts_valid_input_and_writes_nothing(
    config_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths_before = sorted(config_path.parent.iterdir())
    assert nightjar("validate", config_path, monkeypatch=monkeypatch) == 0
    assert sorted(config_path.parent.iterdir()) == paths_before


@pytest.mark.parametrize("command", ["validate", "run"])
@pytest.mark.parametrize(
    ("override", "message_parts"),
    [
        ("training.epoch=3", ["training.epoch: unknown key", "training.epochs"]),
        ("interactions.paths=absent.parquet", ["absent.parquet", "interactions.paths"]),
        ("interactions.user_column=usr", ["log.parquet", "usr", "user_id"]),
        ("embeddings.vector_column=vector", ["vectors.parquet", "vector"]),
        ("tables.item.dim=16", ["8", "16"]),
    ],
)
def test_a_bad_config_or_input_ends_a_command_with_exit_code_2_before_anything_starts(
    config_path: Path,
    command: str,
    override: str,
    message_parts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "prepare_environment", lambda *_, **__: None)  # it would change the environment of this process
    assert nightjar(command, config_path, "--set", override, monkeypatch=monkeypatch) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(part in printed.err for part in message_parts), printed.err
    assert not (config_path.parent / "workspace" / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "--until", "trian"],
            "no such stage; the stages are ingest_embeddings, ingest_interactions, ingest_features, embed_log, check_data",
        ),
        (["run", "--resume", "20200101-000000-0000"], "no such run"),
        (["run", "--promote", "force"], "promote is force, but there is no reason; give a reason"),
        (["run", "--resume", "../.."], "run id '../..': a run id consists of letters, digits, - and _"),
        (["query"], "pass --user, --history or both; or --item alone"),
        (["query", "--user", "1", "--item", "2"], "pass --user, --history or both; or --item alone"),
    ],
)
def test_invalid_arguments_are_reported_in_one_message(
    config_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "prepare_environment", lambda *_, **__: None)
    command, *options = arguments
    assert nightjar(command, config_path, *options, monkeypatch=monkeypatch) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and message in printed.err and printed.err.startswith("error: ")


def test_the_doctor_does_not_ignore_an_override_without_a_config_file() -> None:
    result = CliRunner().invoke(cli.app, ["doctor", "--set", "workspace=/data"])
    assert isinstance(result.exception, InputError) and "no file is given; add FILE" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--set", "workspace=/proc/none"], "workspace /proc/none: cannot be written"),
        (["query", "--user", "1", "--set", "workspace=/dev/null/x"], "workspace /dev/null/x: /dev/null is not a folder"),
        (["query", "--user", "1", "--json"], "has no champion"),
    ],
)
def test_an_input_error_is_one_message_without_a_traceback(
    config_path: Path, new_database: Path, arguments: list[str], message: str
) -> None:
    (config_path.parent / "workspace").mkdir()
    shutil.copy(new_database, config_path.parent / "workspace")
    command, *options = arguments
    process = subprocess.run(
        [sys.executable, "-m", "flows.cli", command, str(config_path), *options],
        capture_output=True,
        text=True,
        cwd=Path(cli.__file__).parents[2],
    )
    assert process.returncode == 2, process.stderr
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    assert process.stdout == ""


@pytest.mark.parametrize("command", ["validate", "run"])
def test_a_corrupt_parquet_footer_ends_a_command_with_exit_code_2_and_one_line(
    config_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "prepare_environment", lambda *_, **__: None)
    log_path = config_path.parent / "log.parquet"
    log_path.write_bytes(log_path.read_bytes()[:-100] + b"PAR1")
    assert nightjar(command, config_path, monkeypatch=monkeypatch) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {log_path}: not a readable parquet file (") and printed.err.count("\n") == 1


def test_a_bad_row_ends_a_run_with_exit_code_2_and_one_message(config_path: Path) -> None:
    log_columns = {"user_id": ["a", "b\x1b[31m\u202e"] * 50, "item_id": np.arange(100) % 20, "timestamp": np.arange(100) * 3600}
    log_columns["timestamp"][1] = -7
    pq.write_table(pa.table(log_columns), config_path.parent / "log.parquet")
    process = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run", str(config_path)],
        capture_output=True,
        text=True,
        cwd=Path(cli.__file__).parents[2],
    )
    assert process.returncode == 2, process.stderr
    message = f"error: {config_path.parent / 'log.parquet'}: column 'timestamp', row 1: -7 is before 1970 (1 of 100 rows); "
    assert sum(line.startswith("error: ") for line in process.stderr.splitlines()) == 1
    assert message in process.stderr
    assert "Traceback" not in process.stderr and "Traceback" not in process.stdout
    assert "nanobind" not in process.stderr
    (run_folder,) = (config_path.parent / "workspace" / "runs").iterdir()
    assert not list(run_folder.glob("ingest_interactions*")) and not list(run_folder.glob("**/*.tmp"))


def test_in_an_ascii_locale_other_characters_are_escaped(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(cli.__file__).parents[2]), "HOME": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-m", "flows.cli", "validate", "größe.yaml"],
        capture_output=True,
        cwd=tmp_path,
        env=environment | {"PYTHONIOENCODING": "ascii"},
        encoding="utf-8",
        check=False,
    )
    assert (process.returncode, process.stderr) == (
        2,
        "error: gr\\xf6\\xdfe.yaml: no such file; `nightjar init 'gr\\xf6\\xdfe.yaml'` writes one\n",
    )
