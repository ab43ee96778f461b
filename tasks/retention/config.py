"""Config of the retention of runs and model versions, and of the disk budget of a workspace."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from recsys_core.config import MAX_DAYS, OPERATIONAL, Settings

MAX_RUNS = 1_000_000


class RetentionConfig(Settings):
    """Limits of a workspace. Model versions with an alias, their runs, and files that a newer run reads are always kept."""

    keep_full_runs: Annotated[int, OPERATIONAL] = Field(
        7,
        ge=1,
        le=MAX_RUNS,
        description="number of newest runs that keep all their files. Older runs keep only their manifests, reports and plots",
    )
    keep_report_runs: Annotated[int, OPERATIONAL] = Field(
        365,
        ge=1,
        le=MAX_RUNS,
        description="number of newest runs that keep their manifests, reports and plots. The folders of older runs are removed",
    )
    flow_run_days: Annotated[int, OPERATIONAL] = Field(
        90,
        ge=1,
        le=MAX_DAYS,
        description="number of days after which a Prefect server that nightjar started deletes a flow run with its logs and "
        "artifacts",
    )
    keep_versions: Annotated[int, OPERATIONAL] = Field(
        10,
        ge=1,
        le=MAX_RUNS,
        description="number of newest versions of the MLflow model that are kept. Older versions without an alias are "
        "deleted with their files. Some former champions (docs/operations.md lists them) are not deleted, and neither is a "
        "version whose refit is kept",
    )
    disk_budget_gb: Annotated[float | None, OPERATIONAL] = Field(
        None,
        gt=0,
        le=10_000_000,
        description="largest size of the workspace in GiB. A run does not start if the workspace plus the files that the run "
        "is expected to write exceed this size. Default: no limit except the free space of the disk",
    )

    @model_validator(mode="after")
    def _full_runs_have_reports(self) -> Self:
        if self.keep_report_runs < self.keep_full_runs:
            raise ValueError(
                f"keep_report_runs is {self.keep_report_runs}, but keep_full_runs is {self.keep_full_runs}; set "
                "keep_report_runs to at least keep_full_runs"
            )
        return self
