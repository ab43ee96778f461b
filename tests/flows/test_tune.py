"""`nightjar tune`: its memory, and the ranges it refuses; tests/drills/test_tuning.py tunes real trainings."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli.tune import check_tunable
from flows.config_file import load_config, to_paste
from recsys_core.errors import InputError
from tasks.tuning.config import RangeConfig, TuningConfig
from tasks.tuning.study import Result, Study, best_first
from tests.flows.tuning import CONFIG


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ("model.temprature: {low: 1, high: 2}", "model.temprature: unknown key; did you mean model.temperature?"),
        ("model.temperature: {low: 2, high: 1}", "ranges.model.temperature: low is 2, but high is 1; swap them"),
        ("model.temperature: {low: 0, high: 1, log: true}", "log is true, but low is 0, which has no logarithm"),
        ("model.temperature: {low: 1, high: 2, log: true, step: 1}", "factors have no step"),
        ("model.temperature: {low: 1}", "says neither low and high nor choices"),
        ("loss.kind: {choices: []}", "choices is empty"),
        ("loss.kind: {choices: [bce, bce]}", "choices has bce 2 times"),
        ("loss.kind: {choices: [bce], low: 1}", "gives choices and low"),
        ("loss.kind: {choices: [softmax, bxe]}", "loss.kind: Input should be 'softmax', 'bce'"),
        ("model.embedding_dim: {low: 16, high: 64}", "model.embedding_dim: Input should be a multiple of 4, but it is 17"),
        ("loss.num_negatives: {low: 16, high: 64, step: 0.5}", "loss.num_negatives: Input should be a valid integer"),
        ("model.user_id: {low: 0, high: 1}", "model.user_id: takes no numbers; give {choices: [...]}"),
        ("tables.brand.dim: {choices: [16, 32]}", "tables.brand: the model has no such table; it has ['item']"),
        ("model.temperature.x: {low: 1, high: 2}", "model.temperature is the value 1.0, not a group of settings"),
        ("interactions.min_events: {low: 1, high: 2}", "interactions.min_events: all trials share one ingest"),
        ("index.kind: {choices: [flat]}", "index.kind: all trials share one ingest and end with training"),
        ("training.validation.k: {choices: [5, 10]}", "training.validation.k: trials are compared by it"),
        ("training.warm_start.full_retrain_every: {choices: [1, 7]}", "trials start from scratch"),
    ],
)
def test_a_range_that_cannot_be_is_refused_when_the_file_is_read(tmp_path: Path, ranges: str, said: str) -> None:
    file = tmp_path / "nightly.yaml"
    file.write_text(CONFIG[: CONFIG.index("  ranges:")] + f"  ranges: {{{ranges}}}\n")
    with pytest.raises(InputError) as caught:
        load_config(file)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [("tuning=null", "has no tuning; say what to vary"), ("training.validation=null", "trials are compared by it")],
)
def test_a_file_without_ranges_or_without_validation_is_refused(tmp_path: Path, override: str, said: str) -> None:
    file = tmp_path / "nightly.yaml"
    file.write_text(CONFIG)
    with pytest.raises(InputError, match=said):
        check_tunable(load_config(file, [override]), file=file)


def test_whole_numbers_of_a_setting_that_takes_any_number_are_ends_and_not_steps(tmp_path: Path) -> None:
    file = tmp_path / "nightly.yaml"
    ranges = "model.query.dropout: {low: 0, high: 1e-1}, model.history.length: {low: 0, high: 4}"
    file.write_text(CONFIG[: CONFIG.index("  ranges:")] + f"  ranges: {{{ranges}}}\n")
    tuning = load_config(file).tuning
    assert tuning is not None
    assert [type(wish.low) for wish in tuning.ranges.values()] == [float, int]


def test_a_list_of_which_a_part_varies_is_pasted_whole(tmp_path: Path) -> None:
    file = tmp_path / "nightly.yaml"
    file.write_text(CONFIG)
    gradual = "tables={item: {transfer: gradual, unfreeze: [{epoch: 1, share: 0.2}, {epoch: 2, share: 1.0}]}}"
    config = load_config(file, ["embeddings={paths: vectors.parquet, vector_column: embedding}", gradual])
    settings = {"tables.item.unfreeze.0.share": 0.5, "loss.kind": "bce"}
    unfreeze = [{"epoch": 1, "share": 0.5}, {"epoch": 2, "share": 1.0}]
    assert yaml.safe_load(to_paste(config, settings)) == {"tables": {"item": {"unfreeze": unfreeze}}, "loss": {"kind": "bce"}}


def opened(folder: Path, *, seed: int = 1) -> Study:
    ranges = {
        "layers": RangeConfig(choices=([64], [64, 32], None)),
        "rate": RangeConfig(low=0.001, high=1.0, log=True),
        "length": RangeConfig(low=4, high=20, step=4),
    }
    return Study(TuningConfig(seed=seed, ranges=ranges), folder=folder, metric="ndcg@10", run_id="tune-1")


def test_a_study_that_is_opened_anew_for_each_trial_tries_what_an_undisturbed_one_tries(tmp_path: Path) -> None:
    def tries(folder: Path, *, anew: bool) -> list[dict[str, Any]]:
        study = opened(folder)
        for number in range(12):  # from the eleventh on they depend on what came before
            if anew:
                study.next()  # and is interrupted
                study = opened(folder)
            attempt = study.next()
            assert attempt.number == number
            study.end(attempt, Result(ending="complete", value=1 / (1 + number), seconds=1.0))
        return [trial.settings for trial in study.tried]

    undisturbed = tries(tmp_path / "one", anew=False)
    assert tries(tmp_path / "two", anew=True) == undisturbed
    assert all(settings["layers"] in ([64], [64, 32], None) for settings in undisturbed)
    assert {settings["length"] for settings in undisturbed} <= {4, 8, 12, 16, 20}
    assert len({settings["rate"] for settings in undisturbed}) == 12


def test_a_complete_trial_goes_before_a_pruned_one_that_was_better_when_it_was_ended(tmp_path: Path) -> None:
    study = opened(tmp_path / "study")
    for ending, value in (("failed", None), ("pruned", 0.9), ("complete", 0.2), ("complete", 0.3)):
        study.end(study.next(), Result.model_validate({"ending": ending, "value": value, "seconds": 1}))
    assert [trial.number for trial in best_first(study.tried)] == [3, 2, 1, 0]
    assert study.best is not None and study.best.number == 3
