"""Deployments in a real Prefect server, their forms, and the states of flow runs whose process has ended."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from uuid import UUID

import psutil
import pytest
from prefect import runtime, task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Completed, Crashed, Pending, Running
from ruamel.yaml import YAML

from flows.cli.commands.deploy import deploy_pipeline
from flows.prefect_runs import (
    end_as_crashed,
    end_lost_runs,
    end_lost_runs_of_commands,
    fail_run_with_unknown_parameters,
    load_form_config,
    prefect_client,
)
from flows.scheduled import deployments
from flows.scheduled.crash_report import start_reporter
from flows.scheduled.deployed import deployed_retrain
from flows.servers.prefect_server import embedded_server
from flows.settings import yaml_loader
from flows.settings.config_file import LoadedConfig
from recsys_core.errors import InputError
from tasks import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[3]
LOG_SETTINGS = {"interactions": {"paths": "log/*.parquet", "timestamp_column": "ts"}}
POOL = "workers"


@pytest.fixture(scope="module", autouse=True)
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start a Prefect server with a work pool, and set PREFECT_API_URL to its address."""
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("PREFECT_"):
                patch.delenv(name)
        patch.setenv("PREFECT_HOME", str(folder / "prefect"))
        with embedded_server() as server:
            assert server is not None
            server.start_prefect(log_file=folder / "prefect.log")
            server.wait_until_ready()
            # Prefect has read its settings at import, which may have been before this test.
            settings = {
                PREFECT_API_URL: server.api_url,
                PREFECT_API_AUTH_STRING: os.environ["PREFECT_API_AUTH_STRING"],
                PREFECT_CLIENT_MAX_RETRIES: 3,  # a busy sqlite database answers 503
            }
            with temporary_settings(settings), prefect_client() as client:
                client._client.post("/work_pools/", json={"name": POOL, "type": "process"}).raise_for_status()
                yield


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with prefect_client() as client:
        yield client


def write_config(folder: Path, *overrides: str, **settings: object) -> LoadedConfig:
    """Write a config with these settings, and load it with the overrides."""
    config_path = folder / "nightly.yaml"
    config_path.write_text(yaml_loader.dump({**LOG_SETTINGS, **settings}))
    return LoadedConfig.read(config_path, overrides)


def deploy(folder: Path, *, work_pool: str | None = POOL, dry_run: bool = False, **settings: object) -> None:
    loaded_config = write_config(folder, "training.epochs=1", **settings)
    deploy_pipeline(loaded_config, work_pool_name=work_pool, dry_run=dry_run)


def test_a_deployment_has_a_schedule_a_limit_of_one_run_and_the_config_as_a_parameter(
    tmp_path: Path, client: SyncPrefectClient, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = {"cron": "15 2 * * *", "timezone": "Asia/Tokyo"}
    deploy(tmp_path, name="movies", schedule=schedule, dry_run=True)
    assert deployments.read_deployment(client, "movies") is None
    assert re.search(r"nightly-retrain/movies +would be created", capsys.readouterr().out)

    deploy(tmp_path, name="movies", schedule=schedule)
    deployment = deployments.read_deployment(client, "movies")
    assert deployment is not None
    assert deployment.entrypoint == "flows.scheduled.deployed.deployed_retrain"
    assert deployment.pull_steps in (None, [])
    assert deployment.parameters == {"pipeline": str(tmp_path / "nightly.yaml"), "overrides": ["training.epochs=1"]}
    assert deployment.global_concurrency_limit is not None
    assert deployment.global_concurrency_limit.limit == 1
    assert deployment.concurrency_options is not None
    assert deployment.concurrency_options.collision_strategy.value == "CANCEL_NEW"
    assert deployment.job_variables["env"]["PREFECT_LOGGING_EXTRA_LOGGERS"] == "nightjar,recsys_core"
    assert {"reason", "resume", "promote"} <= set(deployment.parameter_openapi_schema["properties"])
    assert capsys.readouterr().out.count("02:15 JST") == 1

    entrypoint_by_name = {name: f"flows.champion.{name}" for name in ("promote", "rollback")}
    entrypoint_by_name |= {"recommend": "flows.delivery.recommend", "refresh": "flows.refresh.refresh"}
    for name, entrypoint in entrypoint_by_name.items():
        manual_deployment = deployments.read_deployment(client, "movies", flow_name=name)
        assert manual_deployment is not None
        assert (manual_deployment.entrypoint, manual_deployment.schedules, manual_deployment.global_concurrency_limit) == (
            entrypoint,
            [],
            None,
        )
        assert manual_deployment.parameters == deployment.parameters


def test_a_second_deploy_prints_only_changes_and_leaves_other_pipelines_alone(
    tmp_path: Path, client: SyncPrefectClient, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("books", "music"):
        deploy(tmp_path, name=name, schedule={"cron": "15 2 * * *"})
    capsys.readouterr()
    deploy(tmp_path, name="books", schedule={"cron": "15 2 * * *"})
    output = capsys.readouterr().out
    assert [line.split() for line in output.splitlines()[:5]] == [
        [f"{flow_name}/books", "unchanged"] for flow_name in ("nightly-retrain", "promote", "rollback", "recommend", "refresh")
    ]
    deploy(tmp_path, name="books", schedule={"on_overrun": "queue"})
    output = capsys.readouterr().out
    assert [line.split() for line in output.splitlines()[1:3]] == [
        ["nightly-retrain", "schedule", "15", "2", "*", "*", "*", "UTC", "none"],
        ["nightly-retrain", "concurrent", "runs", "1,", "CANCEL_NEW", "1,", "ENQUEUE"],
    ]
    assert "by hand only" in output
    books_deployment, music_deployment = (deployments.read_deployment(client, name) for name in ("books", "music"))
    assert books_deployment is not None
    assert music_deployment is not None
    assert books_deployment.schedules == []
    assert [schedule.schedule.cron for schedule in music_deployment.schedules] == ["15 2 * * *"]


@pytest.mark.parametrize("paused_flow", ["nightly-retrain", "refresh"])
def test_a_schedule_that_a_person_has_paused_stays_paused(tmp_path: Path, client: SyncPrefectClient, paused_flow: str) -> None:
    schedule_settings = {"cron": "15 2 * * *", "refresh_cron": "0 9-18 * * *"}
    deploy(tmp_path, name=f"paused-{paused_flow}", schedule=schedule_settings)
    deployment = deployments.read_deployment(client, f"paused-{paused_flow}", flow_name=paused_flow)
    assert deployment is not None
    client.update_deployment_schedule(deployment.id, deployment.schedules[0].id, active=False)
    deploy(tmp_path, name=f"paused-{paused_flow}", schedule=schedule_settings)
    schedules_by_flow = {}
    for flow_name in ("nightly-retrain", "refresh"):
        deployment = deployments.read_deployment(client, f"paused-{paused_flow}", flow_name=flow_name)
        assert deployment is not None
        schedules_by_flow[flow_name] = [(schedule.schedule.cron, schedule.active) for schedule in deployment.schedules]  # type: ignore[union-attr]
    assert schedules_by_flow == {
        "nightly-retrain": [("15 2 * * *", paused_flow != "nightly-retrain")],
        "refresh": [("0 9-18 * * *", paused_flow != "refresh")],
    }


@pytest.mark.parametrize(
    ("work_pool", "problem"),
    [("gpus", "--work-pool gpus: the Prefect server has no such work pool"), (None, "--work-pool is missing")],
)
def test_the_error_about_a_missing_work_pool_has_the_command_that_creates_it(
    tmp_path: Path, client: SyncPrefectClient, work_pool: str | None, problem: str
) -> None:
    command = f"prefect work-pool create {work_pool or 'nightjar'} --type process"
    with pytest.raises(InputError) as error_info:
        deploy(tmp_path, name="nowhere", work_pool=work_pool)
    assert str(error_info.value) == f"{problem}; the server's work pools are ['{POOL}']; create one with: {command}"
    assert deployments.read_deployment(client, "nowhere") is None


def test_a_name_that_prefect_does_not_accept_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"name: is 'a/b', but Prefect allows none of / % & > < in the name of a deployment"):
        deploy(tmp_path, name="a/b")


@pytest.mark.parametrize("make_last_state", [Running, Completed])
def test_the_reporter_sets_only_a_running_flow_run_to_crashed_and_the_next_run_can_start(
    tmp_path: Path, client: SyncPrefectClient, make_last_state: Callable[[], State]
) -> None:
    deploy(tmp_path, name="killed")
    deployment = deployments.read_deployment(client, "killed")
    assert deployment is not None
    run, next_run = (client.create_flow_run_from_deployment(deployment.id) for _ in range(2))
    for state in (Pending(), Running(), make_last_state()):
        client.set_flow_run_state(run.id, state)
    reporter, pipe_fd = start_reporter(str(run.id))
    os.close(pipe_fd)  # the kernel does this when the process of a flow run ends
    assert reporter.wait(30) == 0
    state_type = client.read_flow_run(run.id).state_type
    assert state_type is not None and state_type.value == ("CRASHED" if make_last_state is Running else "COMPLETED")
    assert client.set_flow_run_state(next_run.id, Pending()).status.value == "ACCEPT"


def test_a_run_with_unknown_parameters_ends_as_failed_and_names_them(tmp_path: Path, client: SyncPrefectClient) -> None:
    deploy(tmp_path, name="forms")
    deployment = deployments.read_deployment(client, "forms")
    assert deployment is not None and deployed_retrain.on_crashed_hooks == [fail_run_with_unknown_parameters]
    for parameters, state_name in (({"epochs": 3, "dry-run": True}, "Failed"), ({"dry_run": True}, "Crashed")):
        run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
        # Prefect's runner sets this state if the flow does not accept the parameters.
        crashed_state = client.set_flow_run_state(run.id, Crashed(), force=True).state
        assert crashed_state is not None
        fail_run_with_unknown_parameters(deployed_retrain, run, crashed_state)
        state = client.read_flow_run(run.id).state
        assert state is not None and state.name == state_name
        if state_name == "Failed":
            assert str(state.message).startswith("unknown parameters dry-run, epochs; the parameters of nightly-retrain are ")


def test_only_errors_about_files_next_to_the_deployed_config_quote_the_file(
    tmp_path: Path, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_folder = tmp_path / "configs"
    config_folder.mkdir()
    deploy(config_folder, name="forms")
    deployment = deployments.read_deployment(client, "forms")
    assert deployment is not None
    monkeypatch.setattr(runtime.deployment, "id", str(deployment.id), raising=False)
    for path in (tmp_path / "shadow", config_folder / "neighbour.yaml"):
        path.write_text("content: 1\n")
    (config_folder / "link.yaml").symlink_to(tmp_path / "shadow")
    with pytest.raises(InputError, match="content: unknown key"):
        load_form_config(str(config_folder / "neighbour.yaml"))
    for path in (tmp_path / "shadow", config_folder / "link.yaml", tmp_path / "absent"):
        with pytest.raises(InputError) as error_info:
            load_form_config(str(path))
        assert str(error_info.value).startswith(f"{path}: the config file or one of the overrides is invalid; the reason is ")
        assert "content" not in str(error_info.value).removeprefix(str(path))


@pytest.mark.parametrize("version", ["2.20.4", "3.1.0"])
def test_a_server_of_an_incompatible_version_is_an_input_error_with_both_versions(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    class VersionHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f'"{version}"'.encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), VersionHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        monkeypatch.setenv("PREFECT_API_URL", url)
        message = rf"{url} has version {version}, but this installation of nightjar has Prefect 3\.\d+\.\d+"
        with (
            temporary_settings({PREFECT_API_URL: url}),
            pytest.raises(InputError, match=message),
            prefect_client(),
        ):
            pass
        server.shutdown()


def test_a_wrong_secret_is_an_input_error() -> None:
    with (
        temporary_settings({PREFECT_API_AUTH_STRING: "a:wrong"}),
        pytest.raises(InputError, match="with HTTP status 401; set PREFECT_API_AUTH_STRING"),
        prefect_client(),
    ):
        pass


def test_a_server_that_does_not_answer_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://ada:s3cret@127.0.0.1:9/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    with (
        temporary_settings({PREFECT_API_URL: url}),
        pytest.raises(
            InputError, match=r"^the Prefect server at http://ada:\*\*\*@127.0.0.1:9/api does not work: ConnectError: "
        ),
        prefect_client(),
    ):
        pass


def test_a_run_whose_process_has_died_ends_as_crashed_and_frees_its_slot(tmp_path: Path, client: SyncPrefectClient) -> None:
    deploy(tmp_path, name="lost")
    deployment = deployments.read_deployment(client, "lost")
    assert deployment is not None
    lost_run, current_run = (client.create_flow_run_from_deployment(deployment.id) for _ in range(2))
    for state in (Pending(), Running()):
        client.set_flow_run_state(lost_run.id, state)
    client.set_flow_run_state(current_run.id, Pending())
    assert client.read_flow_run(current_run.id).state_name == "Cancelled"  # the lost run still has the slot

    current_run = client.create_flow_run_from_deployment(deployment.id)
    end_lost_runs(deployment.id)
    for state in (Pending(), Running()):
        client.set_flow_run_state(current_run.id, state)
    end_lost_runs(deployment.id, current_flow_run_id=current_run.id)
    assert [client.read_flow_run(run.id).state_name for run in (lost_run, current_run)] == ["Crashed", "Running"]


def test_only_lost_flow_runs_without_a_deployment_end_as_crashed(tmp_path: Path, client: SyncPrefectClient) -> None:
    deploy(tmp_path, name="other")
    deployment = deployments.read_deployment(client, "other")
    assert deployment is not None
    command_run, deployed_run = client.create_flow_run(deployed_retrain), client.create_flow_run_from_deployment(deployment.id)
    for flow_run in (command_run, deployed_run):
        for state in (Pending(), Running()):
            client.set_flow_run_state(flow_run.id, state)
    end_lost_runs_of_commands()
    assert [client.read_flow_run(run.id).state_name for run in (command_run, deployed_run)] == ["Crashed", "Running"]
    # The state of a task run may arrive after the end of its flow run.
    command_task_run, deployed_task_run = (
        client.create_task_run(task(lambda: None, name="train"), flow_run_id=run.id, dynamic_key="0", state=Running())
        for run in (command_run, deployed_run)
    )
    end_lost_runs_of_commands()
    assert [client.read_task_run(run.id).state_name for run in (command_task_run, deployed_task_run)] == ["Crashed", "Running"]


def test_a_running_task_run_ends_as_crashed_after_any_number_of_completed_task_runs(client: SyncPrefectClient) -> None:
    trial_task, flow_run = task(lambda: None, name="trial"), client.create_flow_run(deployed_retrain)
    # The server returns at most 200 task runs, in descending order of their ids, so it would leave out the id 1.
    running_id = UUID(int=1)
    client.create_task_run(trial_task, flow_run_id=flow_run.id, dynamic_key="running", id=running_id, state=Running())
    for number in range(200):
        client.create_task_run(trial_task, flow_run_id=flow_run.id, dynamic_key=str(number), state=Completed())
    end_as_crashed(flow_run.id, message="stopped")
    assert client.read_task_run(running_id).state_name == "Crashed"


def test_prefect_yaml_describes_the_deployments_that_nightjar_deploy_creates(tmp_path: Path) -> None:
    entries = YAML(typ="safe", pure=True).load((ROOT / "prefect.yaml").read_text())["deployments"]
    retrain_entry, *manual_entries = entries
    loaded_config = write_config(tmp_path, schedule=retrain_entry["schedules"][0])
    new_deployments = deployments.deployments_of(loaded_config, work_pool_name="nightjar")
    for entry, deployment in zip(entries, new_deployments, strict=True):
        assert entry["name"] == deployment.name
        assert entry["entrypoint"] == deployment.entrypoint
        assert entry["tags"] == deployment.tags
        assert set(entry["parameters"]) <= set(deployment.parameters)
        assert entry["work_pool"]["job_variables"]["env"] == ENVIRONMENT
    assert retrain_entry["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    assert not any({"concurrency_limit", "schedules"} & set(entry) for entry in manual_entries)


SCRIPT_THAT_IGNORES_SIGTERM = (
    "import os, signal, sys, time; from flows.scheduled import crash_report; crash_report.end_with_worker(); "
    "signal.signal(signal.SIGTERM, lambda *_: None); print('ready', flush=True); time.sleep(120)"
)


def test_a_cancelled_flow_run_that_does_not_end_is_killed() -> None:
    environment = os.environ | {
        "PREFECT__FLOW_RUN_ID": "d3b07384-d9a0-4c9b-8f3e-6f1d2c3b4a59",
        "PREFECT_API_URL": "http://127.0.0.1:1/api",
    }
    environment.pop("NIGHTJAR_PARENT_PID", None)
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT_THAT_IGNORES_SIGTERM], env=environment, stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        (reporter,) = psutil.Process(process.pid).children()
        process.terminate()
        assert process.wait(30) == -signal.SIGKILL
    reporter.kill()  # otherwise it imports Prefect for seconds, to report to a server that does not exist
