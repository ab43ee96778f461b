"""`nightjar plan` for this host and for a cluster, with a real log and with given sizes."""

import json
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from flows.cli.main import app
from recsys_core.errors import InputError
from recsys_core.estimates.run_estimate import RunEstimate
from recsys_core.sharding.plan_file import PlanFile
from tasks.runs.run import LOCK_NAME
from tests.recsys_core.ingest.parquet_files import write_parquet

CLUSTER_SETTINGS = {"ddr_gb": 500, "inter_host_gb_s": 25, "intra_host_gb_s": 300}
SPARK_OVERRIDE = "interactions.engine={kind: spark}"
CLUSTER_OPTIONS = ["--nodes", "2", "--gpus-per-node", "4", "--hbm-gb", "40"]
CLUSTER_OPTIONS += [f"--set=sharding.cluster.{key}={value}" for key, value in CLUSTER_SETTINGS.items()]


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    events = [(user, (user * 7 + step * step) % 50, step) for user in range(40) for step in range(12)]
    user_ids, item_ids, times = (list(column) for column in zip(*events, strict=True))
    log_path = write_parquet(tmp_path / "log.parquet", user_id=user_ids, item_id=item_ids, t=times)
    settings = {
        "workspace": str(tmp_path / "workspace"),
        "interactions": {"paths": log_path, "timestamp_column": "t", "split": {"kind": "leave_last_out"}},
        "model": {"learn_user_embedding": True, "history": {"length": 3}},
        "training": {"batch_size": 16},
        "loss": {"num_negatives": 4},
    }
    config_path = tmp_path / "nightly.yaml"
    config_path.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    return config_path


def test_a_plan_is_written_as_json_and_as_a_page_and_shown_as_tables(config_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(config_path), *CLUSTER_OPTIONS])
    assert result.exit_code == 0, result.output
    plan = PlanFile.read(config_path.parent / "workspace" / "plan" / "plan.json")
    page = (config_path.parent / "workspace" / "plan" / "plan.html").read_text()
    assert plan.world_size == 8 and plan.device == "cuda"
    assert (plan.cluster.inter_host_gb_s, plan.cluster.intra_host_gb_s, plan.cluster.ddr_gb) == (25, 300, 500)
    num_items_per_query = 1 + 3 + 4 / 16  # the positive, the history, and a share of the negatives of the batch
    assert 1 < plan.tables["item"].values_per_query < num_items_per_query, "an item that repeats is looked up once"
    for text in (plan.tables["item"].sharding_type, "HBM", "plan.html"):
        assert text in result.output
    assert "Sharding plan for 8 GPUs" in page and "Time by rank" in page


def test_the_option_json_prints_the_whole_plan(config_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(config_path), *CLUSTER_OPTIONS, "--json"])
    assert result.exit_code == 0, result.output
    plan = PlanFile.model_validate_json(result.output.splitlines()[-1])
    assert plan.world_size == 8


def test_the_stages_of_a_run_on_the_ingested_data_are_estimated(config_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(config_path)])
    assert result.exit_code == 0, result.output
    estimate = RunEstimate.model_validate_json((config_path.parent / "workspace" / "plan" / "estimate.json").read_bytes())
    data_sizes = estimate.workload.data
    assert (data_sizes.num_users, data_sizes.num_events, data_sizes.num_held_out_users) == (40, 480, 40)
    assert estimate.workload.has_linear_baselines
    assert [stage.stage for stage in estimate.stages][:3] == ["ingest_interactions", "check_data", "train"]
    for text in ("with 1 host of", "ingest_interactions", "at this size", "cost: 0.0", "estimate.json"):
        assert text in result.output


def test_sizes_are_planned_and_estimated_without_reading_data(config_path: Path) -> None:
    (config_path.parent / "log.parquet").unlink()
    size_options = ["--users", "1000000000", "--items", "100000000", "--events", "10000000000"]
    result = CliRunner().invoke(
        app, ["plan", str(config_path), *CLUSTER_OPTIONS, *size_options, "--set", SPARK_OVERRIDE, "--cores", "32"]
    )
    assert result.exit_code == 0, result.output
    plan_folder = config_path.parent / "workspace" / "plan"
    plan = PlanFile.read(plan_folder / "plan.json")
    estimate = RunEstimate.model_validate_json((plan_folder / "estimate.json").read_bytes())
    assert {name: (table.rows, table.dim) for name, table in plan.tables.items()} == {
        "item": (100_000_000, 64),
        "user": (1_000_000_000, 64),
    }
    assert estimate.workload.machines.engine == "spark"
    assert not estimate.workload.has_linear_baselines, "100 million items are too many for these baselines"
    assert estimate.workload.training.table_bytes == 1_100_000_000 * (64 + 1) * 4  # with one optimizer value per row
    texts = ["2 hosts of 4 GPUs and 32 cores, and spark for the ingest", "64 cores", "at 1/500", "8 GPUs", "per GPU-hour"]
    assert [text for text in texts if text not in result.output] == []


def test_two_plans_at_the_same_time_in_a_workspace_are_an_input_error(config_path: Path) -> None:
    plan_folder = config_path.parent / "workspace" / "plan"
    plan_folder.mkdir(parents=True)
    with FileLock(plan_folder / LOCK_NAME):
        result = CliRunner().invoke(app, ["plan", str(config_path)])
    assert isinstance(result.exception, InputError)
    assert f"{plan_folder}: another `nightjar plan` is writing this folder; wait for it to end" in str(result.exception)
    assert [path.name for path in plan_folder.iterdir()] == [LOCK_NAME]


def test_one_size_without_the_other_sizes_is_an_input_error(config_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(config_path), "--users", "5"])
    assert isinstance(result.exception, InputError)
    assert "--users without --items, --events" in str(result.exception)
    assert not (config_path.parent / "workspace" / "plan").exists()
