"""Process that runs the deployments of `nightjar up`.

Command: `python -m flows.scheduled.deployment_process FD CONFIG_PATH [OVERRIDE...]`.

The process creates the deployments and writes `ready` or an error to FD. Then it starts each planned or manual run in a
subprocess. At SIGTERM the runs end as interrupted, so they can be resumed.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import psutil
from prefect.deployments.runner import RunnerDeployment
from prefect.runner import Runner

from flows.prefect_runs import end_lost_runs, prefect_client
from flows.scheduled import automations
from flows.scheduled.deployments import deployments_of, paused_flows, read_deployment
from flows.settings.config_file import LoadedConfig
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import NightjarError
from recsys_core.termination import die_with_parent, parent_environment

LOG = logging.getLogger("nightjar")
POLL_INTERVAL_S = 5.0
END_POLL_INTERVAL_S = 0.1
INTERRUPT_GRACE_S = 3.0
"""Time for an interrupted run to end by itself."""


class InterruptingRunner(Runner):
    """Runner that ends its runs as interrupted at SIGTERM. Prefect shows these runs as Crashed.

    Prefect's own runner would cancel the runs.
    """

    async def cancel_all(self) -> None:
        """End all runs. Prefect's handler of SIGTERM calls this method, and then waits for the reports about the runs."""
        run_processes = psutil.Process().children()
        for run_process in run_processes:
            with suppress(psutil.NoSuchProcess):
                run_process.terminate()
        # psutil.wait_procs would collect the exit status of the children, and asyncio would not get it.
        deadline_s = time.monotonic() + INTERRUPT_GRACE_S
        while any(run_process.is_running() for run_process in run_processes) and time.monotonic() < deadline_s:
            await asyncio.sleep(END_POLL_INTERVAL_S)
        for run_process in run_processes:
            with suppress(psutil.NoSuchProcess):
                run_process.kill()


def main() -> None:
    """Run the deployments until SIGTERM, or until the parent process ends."""
    die_with_parent()
    os.environ.update(parent_environment())  # the process of a run ends with this process
    ready_fd_text, config_path, *overrides = sys.argv[1:]
    try:
        loaded_config = LoadedConfig.read(Path(config_path), overrides)
        deployments = prepare_deployments(loaded_config)
    except NightjarError as error:
        os.write(int(ready_fd_text), str(error).encode())
        sys.exit(error.exit_code)
    asyncio.run(_serve(deployments, loaded_config.config, ready_fd=int(ready_fd_text)))
    os._exit(0)  # the exit handlers of libraries take seconds


def prepare_deployments(loaded_config: LoadedConfig) -> tuple[RunnerDeployment, ...]:
    """Return the deployments of a pipeline. Set the flow runs that an earlier process left unfinished to Crashed."""
    config = loaded_config.config
    with prefect_client() as client:
        deployments = deployments_of(loaded_config, work_pool_name=None, paused_flows=paused_flows(client, config))
        for deployment in deployments:
            current_deployment = read_deployment(client, config.name, flow_name=str(deployment.flow_name))
            if current_deployment is not None:
                end_lost_runs(current_deployment.id)
    return deployments


def create_alert_automations(config: PipelineConfig, deployment_id: UUID) -> None:
    """Create or update the automations if the server has the block nightjar-alerts. Log an error as a warning."""
    try:
        with prefect_client() as client:
            if automations.find_alert_block(client) is not None:
                automations.create_automations(client, config, deployment_id=deployment_id)
    except NightjarError as error:
        LOG.warning("could not create the automations that send alerts: %s", error)


async def _serve(deployments: Sequence[RunnerDeployment], config: PipelineConfig, *, ready_fd: int) -> None:
    runner = InterruptingRunner(name="nightjar-up", query_seconds=POLL_INTERVAL_S, pause_on_shutdown=False)
    deployment_id, *_ = [await runner.aadd_deployment(deployment) for deployment in deployments]
    os.write(ready_fd, b"ready")
    os.close(ready_fd)
    await asyncio.to_thread(create_alert_automations, config, deployment_id)
    await runner.start()


if __name__ == "__main__":
    main()
