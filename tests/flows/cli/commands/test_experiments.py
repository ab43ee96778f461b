"""The ranges of `nightjar tune`, `nightjar suggest` on a generated log, and `nightjar popularity-curve` for a small run.

tests/drills/test_tuning.py tunes with real trainings.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from flows.cli.arguments import ConfigOptions
from flows.cli.commands import experiments
from flows.cli.commands.experiments import print_study, tunable_config, tune
from flows.cli.main import app
from flows.settings.config_file import LoadedConfig, load_config, settings_as_yaml
from flows.settings.template import starter_config
from flows.tuning import StudyResult
from recsys_core.errors import InputError, StageError
from recsys_core.manifests import ExportManifest, InteractionsManifest
from tasks.runs.run import REDUCED_FILE_NAME, Run
from tasks.tuning.study import FinishedTrial
from tests.flows.tuning_config import CONFIG
from tests.recsys_core.evaluation.stage_folders import write_export_stage, write_interactions_stage
from tests.recsys_core.ingest.parquet_files import write_parquet


@pytest.mark.parametrize(
    ("ranges_text", "expected_message"),
    [
        ("model.temprature: {low: 1, high: 2}", "model.temprature: unknown key; did you mean model.temperature?"),
        ("model.temperature: {low: 2, high: 1}", "ranges.model.temperature: low is 2, but high is 1; swap them"),
        ("model.temperature: {low: 0, high: 1, log: true}", "log is true, but low is 0, which has no logarithm"),
        ("model.temperature: {low: 1, high: 2, log: true, step: 1}", "a logarithmic range has no step"),
        ("model.temperature: {low: 1}", "neither low and high nor choices are set"),
        ("loss.kind: {choices: []}", "choices is empty"),
        ("loss.kind: {choices: [bce, bce]}", "choices has bce 2 times"),
        ("loss.kind: {choices: [bce, !!binary aGk=]}", "choices has a YAML set or binary value"),
        ("loss.kind: {choices: [bce, !!set {a}]}", "choices has a YAML set or binary value"),
        ("loss.kind: {choices: [bce], low: 1}", "choices and low are both set"),
        ("loss.kind: {choices: [softmax, bxe]}", "loss.kind: Input should be 'softmax', 'bce'"),
        ("model.embedding_dim: {low: 16, high: 64}", "model.embedding_dim: Input should be a multiple of 4, but it is 17"),
        ("loss.num_negatives: {low: 16, high: 64, step: 0.5}", "loss.num_negatives: Input should be a valid integer"),
        (
            "model.learn_user_embedding: {low: 0, high: 1}",
            "model.learn_user_embedding: the setting is not a number; set {choices: [...]}",
        ),
        ("tables.brand.dim: {choices: [16, 32]}", "tables.brand: the model has no such table; it has ['item']"),
        ("model.temperature.x: {low: 1, high: 2}", "model.temperature is the value 1.0, not a group of settings"),
        ("interactions.min_events: {low: 1, high: 2}", "interactions.min_events: all trials share one ingest"),
        ("index.kind: {choices: [flat]}", "index.kind: all trials share one ingest and end after training"),
        ("training.validation.k: {choices: [5, 10]}", "training.validation.k: trials are compared by this setting"),
        (
            "model.history.length: {low: 5, high: 9}, model.history: {choices: [{pooling: mean}, {pooling: recency}]}",
            "tuning.ranges: model.history replaces the value of model.history.length, which then has no effect; drop one of",
        ),
        (
            "model.temperature: {low: 1, high: 2}, 'model.\"temperature\"': {low: 1, high: 2}",
            'tuning.ranges: model."temperature" replaces the value of model.temperature, which then has no effect',
        ),
        ("training.warm_start.full_retrain_every: {choices: [1, 7]}", "trials start from scratch"),
    ],
)
def test_an_invalid_range_is_rejected_when_the_file_is_read(tmp_path: Path, ranges_text: str, expected_message: str) -> None:
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(CONFIG[: CONFIG.index("  ranges:")] + f"  ranges: {{{ranges_text}}}\n")
    with pytest.raises(InputError) as error_info:
        load_config(config_path)
    assert expected_message in str(error_info.value)


def test_a_search_in_a_config_without_validation_is_rejected(tmp_path: Path) -> None:
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(CONFIG)
    with pytest.raises(InputError, match="trials have no metric to be compared by"):
        tunable_config(LoadedConfig.read(config_path, ["training.validation=null"]), num_trials=None)


def test_options_replace_the_size_of_the_search(tmp_path: Path) -> None:
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(CONFIG)
    tuning = tunable_config(LoadedConfig.read(config_path, ["tuning=null"]), num_trials=7, minutes=1.5).tuning
    assert tuning is not None and (tuning.trials, tuning.timeout_s, tuning.ranges) == (7, 90, {})
    tuning = tunable_config(LoadedConfig.read(config_path), num_trials=None).tuning
    assert tuning is not None and (tuning.trials, tuning.timeout_s) == (3, None)


def test_the_bounds_of_a_range_have_the_number_type_of_the_setting(tmp_path: Path) -> None:
    config_path = tmp_path / "nightly.yaml"
    ranges_text = "model.query.dropout: {low: 0, high: 1e-1}, model.history.length: {low: 0, high: 4}"
    config_path.write_text(CONFIG[: CONFIG.index("  ranges:")] + f"  ranges: {{{ranges_text}}}\n")
    tuning = load_config(config_path).tuning
    assert tuning is not None
    assert [type(value_range.low) for value_range in tuning.ranges.values()] == [float, int]


def test_settings_as_yaml_writes_a_list_with_one_varied_entry_as_a_whole(tmp_path: Path) -> None:
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(CONFIG)
    gradual_override = "tables={item: {transfer: gradual, unfreeze: [{epoch: 1, share: 0.2}, {epoch: 2, share: 1.0}]}}"
    config = load_config(config_path, ["embeddings={paths: vectors.parquet, vector_column: embedding}", gradual_override])
    settings = {"tables.item.unfreeze.0.share": 0.5, "loss.kind": "bce"}
    expected_steps = [{"epoch": 1, "share": 0.5}, {"epoch": 2, "share": 1.0}]
    assert YAML(typ="safe", pure=True).load(settings_as_yaml(config, settings)) == {
        "tables": {"item": {"unfreeze": expected_steps}},
        "loss": {"kind": "bce"},
    }


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    events = [(user, (user * 7 + step * step) % 50, step) for user in range(40) for step in range(12)]
    user_ids, item_ids, times = (list(column) for column in zip(*events, strict=True))
    log_path = write_parquet(tmp_path / "log.parquet", user_id=user_ids, item_id=item_ids, t=times)
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(f"interactions: {{paths: {log_path}, timestamp_column: t, split: {{kind: leave_last_out}}}}\n")
    return config_path


def test_a_file_with_the_suggested_settings_gets_no_more_suggestions(config_path: Path) -> None:
    result = CliRunner().invoke(app, ["suggest", str(config_path), "--json"])
    assert result.exit_code == 0, result.output
    printed_object = json.loads(result.stdout.splitlines()[-1])
    assert printed_object["facts"]["num_train_events"] == 40 * (12 - 2)  # of each user, two events are held out
    assert printed_object["changed"]["model.temperature"] == 0.2

    result = CliRunner().invoke(app, ["suggest", str(config_path)])
    assert result.exit_code == 0, result.output
    assert "a dense log needs a higher temperature" in result.output and "nightjar tune" in result.output
    yaml = YAML(typ="safe", pure=True)
    printed_settings = result.output.partition("for your file\n")[2].partition("\n\n")[0]
    config_path.write_text(json.dumps(yaml.load(config_path.read_text()) | yaml.load(printed_settings)))
    result = CliRunner().invoke(app, ["suggest", str(config_path)])
    assert result.exit_code == 0 and "The file has all suggested settings." in result.output


def test_suggest_writes_a_new_file(config_path: Path, tmp_path: Path) -> None:
    suggested_path = tmp_path / "suggested.yaml"
    result = CliRunner().invoke(app, ["suggest", str(config_path), "--write", str(suggested_path)])
    assert result.exit_code == 0, result.output
    assert f"nightjar run {suggested_path}" in result.output
    assert "suggested: " in suggested_path.read_text() and load_config(suggested_path).model.temperature == 0.2
    result = CliRunner().invoke(app, ["suggest", str(suggested_path), "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout.splitlines()[-1])["changed"] == {}
    result = CliRunner().invoke(app, ["suggest", str(config_path), "--write", str(suggested_path)])
    assert isinstance(result.exception, InputError) and "exists already" in str(result.exception)


def test_a_suggestion_that_contradicts_the_file_is_left_out(config_path: Path) -> None:
    arguments = ["suggest", str(config_path), "--set", "model.history={pooling: self_attention, num_blocks: 1}"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    printed_object = json.loads(result.stdout.splitlines()[-1])
    assert (
        printed_object["left_out"].keys() == {"model.history.pooling"}
        and "model.history.pooling" not in printed_object["changed"]
    )
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "left out, because it contradicts the file" in " ".join(result.output.split())


def test_the_commands_that_suggest_prints_have_the_overrides(config_path: Path) -> None:
    result = CliRunner().invoke(app, ["suggest", str(config_path), "--set", "name=two words"])
    assert result.exit_code == 0, result.output
    for command in ("run", "tune"):
        assert f"nightjar {command} {config_path} --set 'name=two words' " in result.output


def test_the_command_that_continues_a_study_has_the_overrides_of_the_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "best.yaml").write_text("loss: {kind: bce}\n")
    trial = FinishedTrial(
        number=0, settings={"loss.kind": "bce"}, ending="complete", value=0.1, seconds=1, reason="", epochs={1: 0.1}
    )
    loaded_config = LoadedConfig(starter_config(), Path("nightly.yaml"), ("model.embedding_dim=16",))
    print_study(StudyResult(tmp_path, "ndcg@10", [trial]), loaded_config)
    printed_lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "continue nightjar tune nightly.yaml --set model.embedding_dim=16 --trials 2" in printed_lines
    assert "run nightjar run nightly.yaml --set model.embedding_dim=16 --set loss.kind=bce" in printed_lines


def test_the_error_of_a_search_without_a_trial_says_that_the_time_was_too_short(
    tmp_path: Path, config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments, "_run_flow", lambda *_, **__: StudyResult(tmp_path, "ndcg@10", []))
    with pytest.raises(StageError, match=r"^the time of the search, --minutes or tuning\.timeout_s, was over before the first"):
        tune(ConfigOptions(config_path), None, num_trials=None, minutes=0.1, as_json=False)


def test_suggest_ends_with_exit_code_1_if_a_column_is_missing(config_path: Path) -> None:
    result = CliRunner().invoke(app, ["suggest", str(config_path), "--set", "interactions.timestamp_column=nope"])
    assert result.exit_code == 1 and "nope" in str(result.exception)


@pytest.fixture
def run(config_path: Path, tmp_path: Path) -> Run:
    """A run of three users and four items with the stages of the interactions and of the export."""
    config_path.write_text(config_path.read_text() + f"workspace: {tmp_path / 'workspace'}\nevaluation: {{ks: [2]}}\n")
    run = Run("20261125-020000-ab12", workspace=tmp_path / "workspace")
    run.folder.mkdir(parents=True)
    write_interactions_stage(
        run.stage_folder(InteractionsManifest),
        train=[[0, 1], [0], [0, 2]],
        validation=[[2], [3], [1]],
        test=[[], [], []],
        num_items=4,
    )
    queries = {"validation": (range(3), np.eye(4)[:3])}
    write_export_stage(run.stage_folder(ExportManifest), item_vectors=np.eye(4), queries=queries)
    return run


def test_the_popularity_curve_of_the_newest_run_is_printed_and_written(config_path: Path, run: Run) -> None:
    result = CliRunner().invoke(app, ["popularity-curve", str(config_path), "--weights=-0.5, 0.25", "--json"])
    assert result.exit_code == 0, result.output
    curve_points = json.loads(result.stdout.splitlines()[-1])
    assert [(curve_point["weight"], curve_point["is_served"]) for curve_point in curve_points] == [
        (-0.5, False),
        (0, True),
        (0.25, False),
    ]
    assert curve_points[0]["metrics"].keys() == {
        f"{name}@2" for name in ("recall", "ndcg", "coverage", "novelty", "popularity_lift")
    }
    curve_folder = run.workspace / "popularity-curve"
    assert json.loads((curve_folder / f"{run.run_id}.json").read_text()) == curve_points
    assert (curve_folder / f"{run.run_id}.png").read_bytes().startswith(b"\x89PNG")
    result = CliRunner().invoke(app, ["popularity-curve", str(config_path), "--run", run.run_id])
    assert result.exit_code == 0, result.output
    assert "0 (this run)" in result.output and f"{run.run_id}.png" in result.output


@pytest.mark.parametrize(
    ("arguments", "expected_message"),
    [
        (["--weights", "0.1;0.2"], "--weights 0.1;0.2 is not a list of numbers; write, for example, --weights=-0.1,0,0.1"),
        (["--weights", "nan"], "--weights nan has a number that is not finite"),
        (["--run", "other"], "there is no run other; there are 20261125-020000-ab12"),
    ],
)
def test_a_wrong_argument_of_the_popularity_curve_is_rejected(
    config_path: Path, run: Run, arguments: list[str], expected_message: str
) -> None:
    result = CliRunner().invoke(app, ["popularity-curve", str(config_path), *arguments])
    assert isinstance(result.exception, InputError) and expected_message in str(result.exception)
    assert not (run.workspace / "popularity-curve").exists()


def test_a_run_without_its_vectors_has_no_popularity_curve(config_path: Path, run: Run) -> None:
    (run.folder / REDUCED_FILE_NAME).touch()
    result = CliRunner().invoke(app, ["popularity-curve", str(config_path)])
    assert isinstance(result.exception, InputError) and "choose a newer run with --run" in str(result.exception)

    (run.folder / REDUCED_FILE_NAME).unlink()
    shutil.rmtree(run.stage_folder(ExportManifest))  # the run failed before the export
    result = CliRunner().invoke(app, ["popularity-curve", str(config_path)])
    assert isinstance(result.exception, InputError)
    assert f"run {run.run_id} has no vectors, because its stage export is not complete" in str(result.exception)
