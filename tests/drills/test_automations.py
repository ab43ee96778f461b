"""A real Prefect server delivers the alerts of infra/automations to a webhook on the loopback interface."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Failed, Running, Scheduled, State

from flows.scheduled import automations
from flows.scheduled.automations import BLOCK_NAME, create_automations
from flows.settings.template import starter_config
from recsys_core.errors import InputError
from tasks.delivery.publishers import AliasChange, PrefectEvents

pytestmark = pytest.mark.drill
TIMEOUT_S = 180.0
CONFIG = starter_config().model_copy(update={"name": "films"})


@flow
def stub_flow() -> None:
    """A flow that no process executes. The test sets the states of its runs."""


class Receiver:
    """A webhook on the loopback that collects the bodies of its requests."""

    def __init__(self) -> None:
        self.alerts: list[dict] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.alerts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/alerts"

    def texts(self, automation: str) -> list[str]:
        """Return the texts of the alerts of this automation of pipeline films."""
        return [alert["text"] for alert in self.alerts if alert["text"].startswith(f"films: {automation}:")]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[SyncPrefectClient]:
    """A client of `prefect server start`, which marks a run as Late one second after its planned start."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    api = f"http://127.0.0.1:{port}/api"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_SERVICES_LATE_RUNS_AFTER_SECONDS": "1",
        "PREFECT_UI_URL": "http://prefect.example",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(f"the server answers; {tmp_path}/server.log", lambda: is_reachable(f"{api}/health"))
        with temporary_settings({PREFECT_API_URL: api}), get_client(sync_client=True) as client:
            yield client
    finally:
        server.terminate()
        server.wait(60)


def is_reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def wait_until(description: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S:g} s: {description}"
        time.sleep(0.2)


def run_through(client: SyncPrefectClient, deployment: UUID, *states: State) -> str:
    """Create a run of the deployment and set the states one after the other; return the name of the run."""
    run = client.create_flow_run_from_deployment(deployment)
    for state in states:
        client.set_flow_run_state(run.id, state, force=True)
    return run.name


def test_each_automation_delivers_its_alert_for_runs_of_its_pipeline_only(
    tmp_path: Path, client: SyncPrefectClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    films_id, songs_id = (UUID(str(stub_flow.to_deployment(name).apply())) for name in ("films", "songs"))
    with pytest.raises(InputError, match="has no block nightjar-alerts"):
        create_automations(client, CONFIG, deployment_id=films_id)
    Webhook(url=receiver.url).save(BLOCK_NAME)
    folder = tmp_path / "automations"
    shutil.copytree(automations.AUTOMATION_FOLDER, folder)
    for name in ("did-not-start", "overran"):  # Prefect accepts at least 10 s
        automation_path = folder / f"{name}.yaml"
        text = automation_path.read_text()
        automation_path.write_text(text.replace("within: 600", "within: 10").replace("within: 14400", "within: 10"))
        assert "within: 10\n" in automation_path.read_text()
    monkeypatch.setattr(automations, "AUTOMATION_FOLDER", folder)
    names = create_automations(client, CONFIG, deployment_id=films_id)
    first_ids = {automation.name: automation.id for automation in client.read_automations()}
    assert first_ids.keys() == set(names) and len(names) == 5
    client.pause_automation(first_ids["films: run failed"])
    assert create_automations(client, CONFIG, deployment_id=films_id) == names
    automation_by_name = {automation.name: automation for automation in client.read_automations()}
    assert {name: automation.id for name, automation in automation_by_name.items()} == first_ids
    assert [name for name, automation in automation_by_name.items() if not automation.enabled] == ["films: run failed"]
    client.resume_automation(first_ids["films: run failed"])

    failed_run_name = run_through(client, films_id, Running(), Failed(message='rank 1: "out of memory"'))
    rejected_run_name = run_through(client, films_id, Running(), Failed(name="DataRejected", message="no events"))
    run_through(client, songs_id, Running(), Failed())
    for _ in range(3):
        run_through(client, films_id, Running(), Completed(name="NotPromoted", message="recall is less"))
    promoted_run_name = run_through(client, films_id, Running(), Completed(name="Promoted"))
    running_run_name = run_through(client, films_id, Running())
    planned_start = datetime.now(UTC) - timedelta(hours=1)
    late_run = client.create_flow_run_from_deployment(films_id, state=Scheduled(scheduled_time=planned_start))
    alias_change = AliasChange("nightjar", "champion", "3", "4", "recall@20 is at least as good")
    PrefectEvents("f", "films", run_reason="", run_id="r").publish(alias_change)

    num_expected_alerts = {
        "run failed": 2,
        "not promoted three times": 1,
        "did not start": 1,
        "overran": 1,
        "champion changed": 1,
    }
    wait_until(
        f"the alerts {num_expected_alerts}, received {receiver.alerts}",
        lambda: all(len(receiver.texts(name)) >= number for name, number in num_expected_alerts.items()),
    )
    assert {name: len(receiver.texts(name)) for name in num_expected_alerts} == num_expected_alerts
    assert len(receiver.alerts) == sum(num_expected_alerts.values()), receiver.alerts
    texts = " | ".join(receiver.texts("run failed"))
    assert f'{failed_run_name} is Failed: rank 1: "out of memory" http://prefect.example/' in texts
    assert f"{rejected_run_name} is DataRejected: no events" in texts
    assert running_run_name in receiver.texts("overran")[0] and promoted_run_name not in receiver.texts("overran")[0]
    assert late_run.name in receiver.texts("did not start")[0]
    (change,) = [alert["change"] for alert in receiver.alerts if "change" in alert]
    assert (change["old_version"], change["new_version"], change["pipeline"]) == ("3", "4", "films")
