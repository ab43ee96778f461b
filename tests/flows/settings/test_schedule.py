"""The schedule of a pipeline: the starts that Prefect plans, and errors for invalid cron expressions and time zones."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from zoneinfo import ZoneInfo

import pytest

from flows.settings import yaml_loader
from flows.settings.config_file import load_config
from flows.settings.schedule import ScheduleConfig
from recsys_core.errors import InputError

INTERACTIONS = {"interactions": {"paths": "log/*.parquet", "timestamp_column": "ts"}}
CRON_HELP = "write the five fields minute, hour, day of month, month and day of week, e.g. 15 2 * * * for 02:15 on every day"


def error_message(folder: Path, **schedule: object) -> str:
    """Return the error of a config with this schedule, without the path of the file."""
    config_path = folder / "nightly.yaml"
    config_path.write_text(yaml_loader.dump({**INTERACTIONS, "schedule": schedule}))
    with pytest.raises(InputError) as error_info:
        load_config(config_path)
    return str(error_info.value).removeprefix(f"{config_path}:\n  ")


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("61 2 * * *", "is not a cron expression: Bad minute"),
        ("every day at two", "is not a cron expression: Wrong number of fields"),
        ("@daily", "is not a cron expression: Wrong number of fields"),
        ("0 0 31 2 *", "is not a cron expression: Bad day-of-month"),
        ("15 15 2 * * *", "has a field for seconds"),
        ("0 0 LW * *", "has LW or a number before L, which Prefect does not support"),
        (
            "0 0 * * 1#2,3",
            "has # together with other days of the week or with a day of the month, which Prefect does not support",
        ),
        (
            "0 0 15 * 1#2",
            "has # together with other days of the week or with a day of the month, which Prefect does not support",
        ),
        ("0 3 * * 5-5", "has 5-5, which Prefect reads as all values"),
        ("0 3 1 12/3 *", "has 12/3, which Prefect reads as all values in steps"),
        ("0 3 * * mon,sat/2", "has sat/2, which Prefect reads as all values in steps"),
        ("0 0 30 2 1", "is not a cron expression: Bad day-of-month"),
    ],
)
def test_an_invalid_cron_expression_is_reported_with_its_problem_and_an_example(
    tmp_path: Path, expression: str, problem: str
) -> None:
    assert error_message(tmp_path, cron=expression) == f"schedule.cron: '{expression}' {problem}; {CRON_HELP}"


@pytest.mark.parametrize(
    ("time_zone", "advice"),
    [
        ("Europe/Berln", "did you mean Europe/Berlin?"),
        ("europe/berlin", "did you mean Europe/Berlin?"),
        ("at home", "write a name such as Europe/Berlin"),
        ("../etc/passwd", "write a name such as Europe/Berlin"),
    ],
)
def test_an_unknown_time_zone_is_reported_with_a_similar_name_or_an_example(
    tmp_path: Path, time_zone: str, advice: str
) -> None:
    assert (
        error_message(tmp_path, timezone=time_zone)
        == f"schedule.timezone: '{time_zone}' is not a time zone of the IANA database; {advice}"
    )


@pytest.mark.parametrize(
    "expression",
    [
        "15 2 * * *",
        "*/5 * * * *",
        "0 0 L * *",
        "30 4 * * mon-fri",
        "0 0 * * 1#2",
        "0 0 * * 1#2,3#1",
        "0 0 * * 7",
        "0 3 */10 * mon",
        "0 3 30 * */3",
        "0 3 * * thu/3",
        "0 3 10-26/7 * 4-5,*",
    ],
)
def test_the_next_start_is_the_start_that_prefect_plans(expression: str) -> None:
    import asyncio

    from prefect.server.schemas.schedules import CronSchedule

    start_after = datetime(2026, 11, 22, 12, 1, tzinfo=UTC)
    schedule = CronSchedule(cron=expression, timezone="Europe/Berlin")
    (next_start,) = asyncio.run(schedule.get_dates(1, start=start_after))
    assert ScheduleConfig(cron=expression, timezone="Europe/Berlin").next_start(start_after) == next_start


def random_field(random: Random, lowest: int, highest: int) -> tuple[str, set[int]]:
    """Return a field of a cron expression and its values."""
    first_value, last_value = sorted(random.sample(range(lowest, highest + 1), 2))
    step = random.randint(2, 7)
    return random.choice(
        [
            ("*", {*range(lowest, highest + 1)}),
            (str(first_value), {first_value}),
            (f"{first_value},{last_value}", {first_value, last_value}),
            (f"{first_value}-{last_value}", {*range(first_value, last_value + 1)}),
            (f"{first_value}-{last_value}/{step}", {*range(first_value, last_value + 1, step)}),
            (f"*/{step}", {*range(lowest, highest + 1, step)}),
        ]
    )


def test_the_next_start_is_the_first_minute_that_the_fields_allow() -> None:
    random = Random(7)
    for _ in range(200):
        bounds = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
        field_texts, (minutes, hours, days, months, weekdays) = zip(
            *(random_field(random, *field_bounds) for field_bounds in bounds), strict=True
        )
        needs_both_days = "*" in (field_texts[2], field_texts[4])  # otherwise one of the two fields is enough
        start_after = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=random.randrange(500_000))
        expected_start = start_after + timedelta(minutes=1)
        while True:
            day_field_matches = (expected_start.day in days, expected_start.isoweekday() % 7 in weekdays)
            if expected_start.month not in months or not (all if needs_both_days else any)(day_field_matches):
                expected_start = expected_start.replace(hour=0, minute=0) + timedelta(days=1)
            elif expected_start.hour not in hours:
                expected_start = expected_start.replace(minute=0) + timedelta(hours=1)
            elif expected_start.minute not in minutes:
                expected_start += timedelta(minutes=1)
            else:
                break
        assert ScheduleConfig(cron=" ".join(field_texts)).next_start(start_after) == expected_start, field_texts


@pytest.mark.parametrize(
    ("day", "hour_by_day"),
    [(datetime(2027, 3, 28, tzinfo=UTC), (3, 2, 2)), (datetime(2026, 10, 25, tzinfo=UTC), (2, 2, 2))],
    ids=["spring", "autumn"],
)
def test_a_start_in_the_hour_of_a_clock_change_happens_once(day: datetime, hour_by_day: tuple[int, ...]) -> None:
    import asyncio

    from prefect.server.schemas.schedules import CronSchedule

    schedule = CronSchedule(cron="15 2 * * *", timezone="Europe/Berlin")
    # Prefect plans repeatedly, each time from the current time.
    plan_times = [day + timedelta(minutes=10 * step) for step in range(-12, 18)]
    planned_starts = [
        [start.astimezone(UTC) for start in asyncio.run(schedule.get_dates(3, start=time))] for time in plan_times
    ]
    starts = sorted({start for plan in planned_starts for start in plan if start < day + timedelta(days=3)})
    local_starts = [start.astimezone(ZoneInfo("Europe/Berlin")) for start in starts]
    assert [(start.day - day.day, start.hour, start.minute) for start in local_starts] == [
        (num_days, hour, 15) for num_days, hour in enumerate(hour_by_day)
    ]
    nightjar_start = ScheduleConfig(cron="15 2 * * *", timezone="Europe/Berlin").next_start(plan_times[0])
    assert nightjar_start is not None
    assert (nightjar_start.day, nightjar_start.hour) == (day.day, hour_by_day[0])


def test_a_pipeline_without_a_cron_expression_has_no_planned_start() -> None:
    assert ScheduleConfig().next_start(datetime.now(UTC)) is None
