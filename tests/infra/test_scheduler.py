"""Creation of flow runs by Prefect's scheduler, with the installed versions of Prefect and of its dependencies.

Some combinations create no flow run: Prefect 3.8.8 with SQLAlchemy 2.1, and Prefect 3.9.1 with whenever 0.10 on Python 3.11.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCHEDULER_SCRIPT = """
import asyncio
from prefect.server import models
from prefect.server.database import provide_database_interface
from prefect.server.schemas.core import Deployment, DeploymentSchedule, Flow
from prefect.server.schemas.schedules import CronSchedule
from prefect.server.services.scheduler import schedule_deployments

async def main():
    db = provide_database_interface()
    await db.create_db()
    async with db.session_context(begin_transaction=True) as session:
        flow = await models.flows.create_flow(session, Flow(name="nightly"))
        schedules = [DeploymentSchedule(schedule=CronSchedule(cron="0 3 * * *"), active=True)]
        await models.deployments.create_deployment(session, Deployment(name="cron", flow_id=flow.id, schedules=schedules))
    await schedule_deployments()  # the server calls this once a minute
    async with db.session_context() as session:
        runs = await models.flow_runs.read_flow_runs(session)
        print(*sorted({f"{run.state_name} {run.expected_start_time:%H:%M}" for run in runs}))

asyncio.run(main())
"""


@pytest.mark.drill
def test_the_scheduler_creates_the_runs_of_a_cron_deployment(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment["PREFECT_HOME"] = str(tmp_path)
    process = subprocess.run([sys.executable, "-c", SCHEDULER_SCRIPT], env=environment, capture_output=True, text=True)
    assert process.stdout == "Scheduled 03:00\n", process.stderr
