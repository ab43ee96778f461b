"""A run that is cancelled in Prefect during the training leaves no process behind: `make drills`."""

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from flows.servers.prefect_server import embedded_server
from flows.settings.config_file import load_config
from recsys_core.launching.messages import LaunchFolder
from tests.drills.test_kill_and_resume import write_config

pytestmark = pytest.mark.drill
ROOT = Path(__file__).resolve().parents[2]
RUN_ID = "20260101-000000-cace"
TIMEOUT_S = 240.0
MAX_END_S = 10.0
MAX_POLL_S = 5.0  # until Prefect's runner, which polls every second, sees that the run is cancelled
SERVE_SCRIPT = "from flows.nightly import nightly_retrain; nightly_retrain.serve(name='drill', pause_on_shutdown=False)"
TRAINING_MODULES = {"recsys_core.training", "recsys_core.launching"}
TORCHX_OVERRIDES = [
    "launcher={kind: torchx, scheduler: local_cwd, env: {OMP_NUM_THREADS: '1'}}",
    "sharding.cluster={device: cpu, num_nodes: 2, processes_per_node: 1}",
]


def wait_until(description: str, condition, *, timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {description}"
        time.sleep(0.1)


def prefect_settings_of_environment() -> AbstractContextManager[object]:
    """Return a context in which Prefect uses the current environment. Prefect itself reads it only when it is imported."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    return temporary_settings({setting: os.environ[setting.name] for setting in (PREFECT_API_URL, PREFECT_API_AUTH_STRING)})


def start_run(parameters: dict) -> str:
    """Wait for the served deployment, start a run of it and return the id of the run."""
    from prefect.client.orchestration import get_client

    async def create_run() -> str:
        async with get_client() as client:
            for _ in range(int(TIMEOUT_S)):
                deployments = await client.read_deployments()
                if deployments:
                    break
                await asyncio.sleep(1)
            return str((await client.create_flow_run_from_deployment(deployments[0].id, parameters=parameters)).id)

    return asyncio.run(create_run())


def cancel(flow_run_id: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelling

    async def set_state() -> None:
        async with get_client() as client:
            await client.set_flow_run_state(flow_run_id, Cancelling(), force=True)

    asyncio.run(set_state())


def state_name_of(flow_run_id: str) -> str:
    from prefect.client.orchestration import get_client

    async def read_state() -> str:
        async with get_client() as client:
            return str((await client.read_flow_run(flow_run_id)).state_name)

    return asyncio.run(read_state())


@pytest.mark.parametrize("overrides", [[], TORCHX_OVERRIDES], ids=["local", "torchx"])
def test_cancelling_in_prefect_ends_every_process_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    if overrides and find_spec("torchx") is None:
        pytest.skip("torchx is not installed")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    config = load_config(write_config(tmp_path), ["training.epochs=10000", "training.validation=null", *overrides])
    attempt_folder = config.workspace / "runs" / RUN_ID / "train.work" / "logs" / "attempt-1"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    with embedded_server() as server, (tmp_path / "serve.log").open("wb") as output, ExitStack() as stack:
        assert server is not None
        server.start_prefect(log_file=tmp_path / "prefect.log")
        server.wait_until_ready()
        stack.enter_context(prefect_settings_of_environment())
        environment |= {name: os.environ[name] for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")}
        serving_process = subprocess.Popen(
            [sys.executable, "-c", SERVE_SCRIPT], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            flow_run_id = start_run({"config": json.loads(config.model_dump_json()), "run_id": RUN_ID})
            metrics_path = attempt_folder.parents[1] / "metrics.jsonl"
            wait_until(
                f"training; {(tmp_path / 'serve.log').read_text()}",
                lambda: metrics_path.is_file() and metrics_path.stat().st_size,
            )
            children = psutil.Process(serving_process.pid).children(recursive=True)
            # The resource tracker belongs to the serving process and does not end with the run.
            run_processes = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
            training_processes = [
                process
                for process in run_processes
                if {"recsys_core.training", "recsys_core.launching"} & set(process.cmdline())
            ]
            training_pids = {process.pid for process in training_processes}
            assert {rank.pid for rank in LaunchFolder(attempt_folder).start_reports().values()} < training_pids
            cancel(flow_run_id)
            _, alive = psutil.wait_procs(training_processes, timeout=MAX_POLL_S + MAX_END_S)
            assert not alive, [survivor.cmdline() for survivor in alive]
            # Prefect ends the process of the flow run itself, which takes longer.
            _, alive = psutil.wait_procs(run_processes, timeout=60)
            assert not alive, [survivor.cmdline() for survivor in alive]
            wait_until("the run is cancelled", lambda: state_name_of(flow_run_id) == "Cancelled", timeout_s=30)
        finally:
            serving_process.terminate()
            serving_process.wait(30)
