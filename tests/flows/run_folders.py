"""Folders of past runs: a record, stub reports, and a file of zeros in place of the trained model."""

import os
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from recsys_core.manifests import STAGES
from tasks.runs.context import RunOptions
from tasks.runs.run import Run
from tasks.runs.run_record import RunFigures, RunRecord, RunState

METRIC = "recall@20"
FIRST_START = datetime(2026, 10, 24, 2, 15, tzinfo=UTC)
_STAGE_SECONDS = (34, 210, 52, 3, 12, 9, 1900, 75, 120, 62, 21, 88)
"""Duration of each stage, in the order of STAGES."""
REJECTED_DAY, FAILED_DAY, KILLED_DAY = 11, 19, 23
"""Days of `month_of_runs`, counted from 0, whose run ended with rejected data, failed or was killed."""


def past_run(
    workspace: Path,
    start: datetime,
    *,
    state: RunState,
    num_stages: int = len(STAGES),
    stage_bytes: int = 4_000,
    **fields: Any,
) -> Run:
    """Write one run folder with the first `num_stages` stages. `fields` are fields of RunRecord or of RunFigures."""
    run = Run(f"{start:%Y%m%d-%H%M%S}-{start.day:04x}", workspace=workspace)
    run.folder.mkdir(parents=True)
    with (run.folder / "weights.bin").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, stage_bytes * (num_stages + 1))
    for report_path in ("check_data/report.html", "plan_sharding/plan.html", "loss.png", "indexes.png")[: num_stages // 2 + 1]:
        (run.folder / report_path).parent.mkdir(exist_ok=True)
        (run.folder / report_path).write_text(report_path)
    figure_names = RunFigures.model_fields.keys() & fields.keys()
    default_figures = {
        "stage_seconds": dict(zip(STAGES, _STAGE_SECONDS[:num_stages], strict=False)),
        "promoted": state == "Promoted",
    }
    figures = default_figures | {name: fields.pop(name) for name in figure_names}
    end = start + timedelta(seconds=sum(_STAGE_SECONDS[:num_stages]) + 40)
    record_fields = {
        "pipeline": "films",
        "host": "trainer-1",
        "pid": 4711,
        "started": start,
        "ended": end,
        "state": state,
    } | fields
    RunRecord.model_validate(record_fields | {"options": fields.pop("options", RunOptions()), "figures": figures}).write(run)
    return run


def month_of_runs(workspace: Path, *, num_runs: int = 30, stage_bytes: int = 4_000) -> list[Run]:
    """Write one run per day. Most are promoted, some are not promoted, and three have no version (see REJECTED_DAY)."""
    random_generator = random.Random(7)
    runs, champion_recall, version = [], 0.212, 40
    for day in range(num_runs):
        start = FIRST_START + timedelta(days=day, seconds=random_generator.randrange(20))
        growth_factor = 1 + 0.004 * day
        common_fields = {
            "stage_bytes": int(stage_bytes * growth_factor),
            "events": int(18_400_000 * growth_factor * random_generator.uniform(0.985, 1.015)),
            "users": int(1_240_000 * growth_factor),
            "validation_users": 1_234,
            "test_users": 5_678,
            "items": int(86_000 + 310 * day),
        }
        if day == REJECTED_DAY:
            message = (
                "the data violates 1 of the limits in data_report: - 8,912,004 training events, 52 % fewer than the run before"
            )
            runs.append(
                past_run(
                    workspace,
                    start,
                    state="DataRejected",
                    num_stages=4,
                    message=message,
                    **common_fields | {"events": 8_912_004},
                )
            )
            continue
        if day == FAILED_DAY:
            message = "the launch failed: rank 1 (pid 28123) ended with SIGKILL; the kernel killed it, probably for memory"
            runs.append(past_run(workspace, start, state="Failed", num_stages=5, message=message, **common_fields))
            (runs[-1].folder / "error.log").write_text("Traceback")
            continue
        if day == KILLED_DAY:
            runs.append(past_run(workspace, start, state="Running", num_stages=0, ended=None, stage_bytes=stage_bytes))
            continue
        version += 1
        recall = champion_recall * random_generator.uniform(0.955, 1.05)
        is_promoted = recall >= 0.98 * champion_recall
        comparison_text = "at least" if is_promoted else "less than"
        reason = f"{METRIC} is {recall:.4f}, {comparison_text} 0.98 times the {champion_recall:.4f} of version {version - 1}"
        options = RunOptions(reason="new prices from the shop") if day == 16 else RunOptions()
        metrics = {f"served/{METRIC}": recall, f"champion/{METRIC}": champion_recall}
        alias = "champion" if is_promoted else "challenger"
        runs.append(
            past_run(
                workspace,
                start,
                state="Promoted" if is_promoted else "NotPromoted",
                message=f"films version {version} is {alias}: {reason}",
                options=options,
                model_name="films",
                version=str(version),
                metrics=metrics,
                **common_fields,
            )
        )
        champion_recall = recall if is_promoted else champion_recall * 0.998
    return runs
