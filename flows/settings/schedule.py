"""Config of the schedule: planned starts, the deadline of a run, and the treatment of an unfinished previous run."""

import difflib
import re
from datetime import datetime, timedelta
from typing import Annotated, Literal
from zoneinfo import available_timezones

from cronsim import CronSim, CronSimError
from pydantic import AfterValidator, Field

from recsys_core.config import Settings
from recsys_core.errors import shown

MINUTES_PER_WEEK = 10_080
_LARGEST_VALUES = (("59",), ("23",), ("31",), ("12", "dec"), ("6", "7", "sat", "sun"))
"""The largest value of each field of a cron expression, in all spellings."""


def _check_cron(expression: str) -> str:
    problem = "has a field for seconds" if len(expression.split()) == 6 else None
    if problem is None and re.search(r"LW|\dL", expression.upper()):
        problem = "has LW or a number before L, which Prefect does not support"
    try:
        CronSim(expression, datetime(2026, 1, 1))
        minute, hour, day, month, _ = expression.split()[-5:]
        CronSim(f"{minute} {hour} {day} {month} *", datetime(2026, 1, 1))  # Prefect fails at 30 February, even with a weekday
    except CronSimError as error:
        problem = problem or f"is not a cron expression: {error}"
    problem = problem or _unsupported_part(expression)
    if problem is not None:
        raise ValueError(
            f"{shown(expression)} {problem}; write the five fields minute, hour, day of month, month and day of week, "
            "e.g. 15 2 * * * for 02:15 on every day"
        )
    return expression


def _unsupported_part(expression: str) -> str | None:
    """Describe the first part of a cron expression that Prefect and cron read differently; return None if there is none.

    >>> _unsupported_part("0 3 * * 5-5"), _unsupported_part("0 3 28/2 12/3 *"), _unsupported_part("0 3 * * 5")
    ('has 5-5, which Prefect reads as all values', 'has 12/3, which Prefect reads as all values in steps', None)
    """
    fields = expression.lower().split()
    if "#" in expression and (fields[2] != "*" or not all("#" in range_text for range_text in fields[4].split(","))):
        return "has # together with other days of the week or with a day of the month, which Prefect does not support"
    for field, largest_values in zip(fields, _LARGEST_VALUES, strict=True):
        for range_text in field.split(","):
            value_range, _, step = range_text.partition("/")
            first_value, _, last_value = value_range.partition("-")
            if first_value == last_value:
                return f"has {range_text}, which Prefect reads as all values"
            if step and value_range in largest_values:
                return f"has {range_text}, which Prefect reads as all values in steps"
    return None


def _check_timezone(timezone: str) -> str:
    valid_names = available_timezones()
    if timezone not in valid_names:
        name_by_lower_case = {name.lower(): name for name in valid_names}
        similar_names = difflib.get_close_matches(timezone.lower(), name_by_lower_case, n=1)
        advice = (
            f"did you mean {name_by_lower_case[similar_names[0]]}?" if similar_names else "write a name such as Europe/Berlin"
        )
        raise ValueError(f"{shown(timezone)} is not a time zone of the IANA database; {advice}")
    return timezone


Cron = Annotated[str, Field(max_length=200), AfterValidator(_check_cron)]


class ScheduleConfig(Settings):
    """When the pipeline runs by itself. `nightjar up` and `nightjar deploy` create the schedule in Prefect."""

    cron: Cron | None = Field(
        None,
        description="planned starts as a cron expression with minute, hour, day of month, month and day of week. For example, "
        "`15 2 * * *` starts a run at 02:15 on every day. Default: runs only by hand",
    )
    refresh_cron: Cron | None = Field(
        None,
        description="planned refreshes of the champion as a cron expression. For example, `0 8-20/2 * * *` starts `nightjar "
        "refresh` every two hours from 08:00 to 20:00. Default: refreshes only by hand",
    )
    timezone: Annotated[str, Field(max_length=100), AfterValidator(_check_timezone)] = Field(
        "UTC", description="time zone of the cron expressions, as a name of the IANA database such as `Europe/Berlin`"
    )
    deadline_minutes: int | None = Field(
        None,
        ge=1,
        le=MINUTES_PER_WEEK,
        description="longest intended duration of a run in minutes. A run that takes longer is reported but not stopped. "
        "Default: four hours in the alert `overran`",
    )
    on_overrun: Literal["skip", "queue"] = Field(
        "skip",
        description="what happens to a new run while another run of the pipeline is running. With `skip`, the new run is "
        "cancelled. With `queue`, the new run starts after the end of the other run",
    )
    unfinished_run: Literal["resume", "new"] = Field(
        "new",
        description="what happens at a planned start if the previous run was interrupted or failed. With `resume`, the "
        "previous run is resumed if the config is unchanged. With `new`, a new run starts",
    )

    @property
    def cron_by_flow(self) -> dict[str, str | None]:
        """Cron expression of each flow that may have a schedule, by the name of the flow."""
        return {"nightly-retrain": self.cron, "refresh": self.refresh_cron}

    def next_start(self, after: datetime, *, flow_name: str = "nightly-retrain") -> datetime | None:
        """Return the first planned start later than `after`, in the time zone of the schedule; None if no cron is set.

        >>> from datetime import UTC
        >>> schedule = ScheduleConfig(cron="15 2 * * *", timezone="Europe/Berlin")
        >>> str(schedule.next_start(datetime(2026, 11, 22, 12, tzinfo=UTC)))
        '2026-11-23 02:15:00+01:00'
        """
        cron = self.cron_by_flow[flow_name]
        if cron is None:
            return None
        # Prefect's class is imported here, because the import takes seconds, and most commands only load the config.
        from prefect.server.schemas.schedules import CronSchedule
        from prefect.utilities.asyncutils import run_coro_as_sync

        schedule = CronSchedule(cron=cron, timezone=self.timezone)
        # The first date that Prefect returns may be equal to `start`.
        planned_starts: list[datetime] | None = run_coro_as_sync(schedule.get_dates(1, start=after + timedelta(microseconds=1)))
        return planned_starts[0] if planned_starts else None
