"""Checks of the Prefect and MLflow servers for `nightjar doctor FILE`, over plain HTTP without retries."""

import os
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

import requests
from filelock import FileLock, Timeout
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from flows.doctor.finding import Finding, not_used, ok, problem
from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import redacted
from tasks.registry.mlflow_client import tracking_uri

REQUEST_TIMEOUT_S = 4.0
MAX_CLOCK_SKEW_S = 5.0
"""Largest accepted difference of two clocks. Schedules, heartbeats and leases compare times of several machines."""
MAX_LATENESS_S = 300.0
"""A planned run counts as late if it has not started this long after its planned start."""
UP_LOCK_NAME = ".up.lock"
"""Lock in the workspace that `nightjar up` holds."""
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


class ServerProblem(Exception):
    """A server does not answer as expected; the message ends with the fix."""


def check_prefect() -> Finding:
    """Check that the server of PREFECT_API_URL answers, accepts the credentials and has a compatible version."""
    api_url = os.environ.get("PREFECT_API_URL")
    if not api_url:
        return not_used("embedded: every command starts its own server; set PREFECT_API_URL to use a running one")
    try:
        server_version = str(_request_prefect("GET", "/admin/version"))
        is_open = not _has_prefect_credentials() or _answers_without_credentials(f"{api_url}/admin/version")
    except ServerProblem as error:
        return problem(str(error))
    return _check_server_version(
        "prefect", server_version, address=api_url, is_open=is_open, fix="PREFECT_SERVER_API_AUTH_STRING"
    )


def check_mlflow(config: PipelineConfig) -> Finding:
    """Check that the server or the database of MLFLOW_TRACKING_URI answers and has a compatible version."""
    uri = tracking_uri(config.workspace)
    if not uri.startswith(("http://", "https://")):
        return _check_mlflow_database(uri)
    try:
        server_version = _request_mlflow(uri, "/version").text.strip()
        _request_mlflow(uri, "/api/2.0/mlflow/registered-models/search?max_results=1")
        is_open = _answers_without_credentials(f"{uri}/api/2.0/mlflow/registered-models/search?max_results=1")
    except ServerProblem as error:
        return problem(str(error))
    return _check_server_version(
        "mlflow", server_version, address=uri, is_open=is_open, fix="`mlflow server --app-name basic-auth`"
    )


def check_clocks(config: PipelineConfig) -> Finding:
    """Compare the clock of this machine with the clocks of the servers, which the Date header of an answer contains."""
    address_by_server = {"Prefect": os.environ.get("PREFECT_API_URL", ""), "MLflow": tracking_uri(config.workspace)}
    skew_s_by_server: dict[str, float] = {}
    for server_name, address in address_by_server.items():
        if address.startswith(("http://", "https://")):
            try:
                request_time_s = time.time()
                response = requests.get(f"{address}/health", timeout=REQUEST_TIMEOUT_S / 2)
                server_time = parsedate_to_datetime(response.headers["Date"]).timestamp()
            except (requests.RequestException, KeyError, ValueError):
                continue  # the check of the server reports it
            # The header has whole seconds, rounded down.
            skew_s_by_server[server_name] = max(request_time_s - server_time - 1, server_time - time.time(), 0.0)
    if not skew_s_by_server:
        return not_used("no HTTP server answers")
    differences = ", ".join(f"{skew_s:.0f} s to {server_name}" for server_name, skew_s in skew_s_by_server.items())
    if max(skew_s_by_server.values()) > MAX_CLOCK_SKEW_S:
        return problem(
            f"{differences}; a difference of more than {MAX_CLOCK_SKEW_S:g} s shifts schedules and deadlines; synchronise both "
            "clocks (NTP)"
        )
    return ok(differences)


def check_schedule(config: PipelineConfig) -> Finding:
    """Check that the deployment of the pipeline exists, is not paused, and has a next run."""
    if not os.environ.get("PREFECT_API_URL"):
        return _check_schedule_of_up(config)
    try:
        deployment = _read_deployment(config)
        if deployment is None:
            return problem(f"the server has no deployment of pipeline {config.name}; create it with `nightjar deploy`")
        deployment_title = f"deployment {deployment['name']}"
        if deployment["paused"]:
            return problem(f"{deployment_title} is paused; resume it on its page in Prefect")
        crons = [schedule["schedule"].get("cron") for schedule in deployment["schedules"]]
        if crons != ([config.schedule.cron] if config.schedule.cron else []):
            return problem(
                f"{deployment_title} has the schedule {', '.join(map(str, crons)) or 'none'}, but schedule.cron is "
                f"{config.schedule.cron or 'empty'}; apply the config with `nightjar deploy`"
            )
        if not crons:
            return not_used(f"{deployment_title} has no schedule: runs are started by hand only")
        if not deployment["schedules"][0]["active"]:
            return problem(
                f"the schedule {crons[0]} of {deployment_title} is paused; resume it on the page of the deployment in Prefect"
            )
        request_body = {
            "deployments": {"id": {"any_": [deployment["id"]]}},
            "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
            "sort": "NEXT_SCHEDULED_START_TIME_ASC",
            "limit": 1,
        }
        next_runs = _request_prefect("POST", "/flow_runs/filter", request_body)
    except ServerProblem:
        return not_used("unknown, because the Prefect server does not answer")
    if not next_runs:
        return problem(
            f"{deployment_title} has an active schedule but no planned run; check that the server runs its scheduler service"
        )
    planned_start = datetime.fromisoformat(next_runs[0]["next_scheduled_start_time"] or next_runs[0]["expected_start_time"])
    next_run_text = f"{deployment_title}: next run at {planned_start.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    if (datetime.now(UTC) - planned_start).total_seconds() > MAX_LATENESS_S:
        return problem(f"{next_run_text}, which is late; start a worker, or check the concurrency limit of the deployment")
    return ok(next_run_text)


def _check_schedule_of_up(config: PipelineConfig) -> Finding:
    """Check that `nightjar up`, which holds a lock of the workspace, is running. PREFECT_API_URL is not set."""
    next_start = config.schedule.next_start(datetime.now(UTC))
    if next_start is None:
        return not_used("schedule.cron is empty: runs are started by hand only")
    lock_file = config.workspace / UP_LOCK_NAME
    try:
        if lock_file.exists():
            FileLock(lock_file).acquire(timeout=0).lock.release()
    except Timeout:
        return ok(f"`nightjar up` is running: next run at {next_start:%Y-%m-%d %H:%M %Z}")
    return problem(
        f"schedule.cron is {config.schedule.cron}, but nothing starts the runs; start `nightjar up`, or set PREFECT_API_URL to "
        "the server of the deployment"
    )


def check_worker(config: PipelineConfig) -> Finding:
    """Check that a process picks up the runs of the deployment: a worker of its work pool, or `nightjar up`."""
    if not os.environ.get("PREFECT_API_URL"):
        return not_used("runs are started by `nightjar run` or `nightjar up`")
    try:
        deployment = _read_deployment(config)
        if deployment is None:
            return not_used("no deployment")
        work_pool_name = deployment["work_pool_name"]
        if work_pool_name is None:
            if deployment["status"] == "READY":
                return ok(f"deployment {deployment['name']} is served")
            return problem(f"no process serves deployment {deployment['name']}; start it with `nightjar up`")
        if _request_prefect("GET", f"/work_pools/{work_pool_name}")["is_paused"]:
            return problem(f"work pool {work_pool_name} is paused; resume it: prefect work-pool resume {work_pool_name}")
        workers = _request_prefect("POST", f"/work_pools/{work_pool_name}/workers/filter", {})
    except ServerProblem as error:
        return problem(str(error)) if "work_pools" in str(error) else not_used("unknown: the Prefect server does not answer")
    online_workers = [worker["name"] for worker in workers if worker["status"] == "ONLINE"]
    if not online_workers:
        heartbeat_times = [worker["last_heartbeat_time"] for worker in workers]
        heartbeat_text = f"the last heartbeat was at {max(heartbeat_times)}" if heartbeat_times else "none has ever connected"
        return problem(
            f"work pool {work_pool_name} has no worker online ({heartbeat_text}); "
            f"start one: prefect worker start --pool {work_pool_name}"
        )
    return ok(f"work pool {work_pool_name}: {', '.join(sorted(online_workers))}")


def _read_deployment(config: PipelineConfig) -> dict[str, Any] | None:
    """Return the deployment of the pipeline's nightly flow; None if the server has none."""
    request_body = {"flows": {"name": {"any_": ["nightly-retrain"]}}, "deployments": {"name": {"any_": [config.name]}}}
    deployments = _request_prefect("POST", "/deployments/filter", request_body)
    return deployments[0] if deployments else None


def _request_prefect(method: str, path: str, request_body: dict[str, Any] | None = None) -> Any:
    """Return the JSON answer of Prefect's API; None if the answer is empty."""
    api_url = os.environ["PREFECT_API_URL"]
    headers = {"Authorization": f"Bearer {api_key}"} if (api_key := os.environ.get("PREFECT_API_KEY")) else {}
    credentials = os.environ.get("PREFECT_API_AUTH_STRING")
    try:
        response = requests.request(
            method,
            api_url + path,
            json=request_body,
            headers=headers,
            auth=tuple(credentials.split(":", 1)) if credentials and ":" in credentials else None,  # type: ignore[arg-type]
            timeout=REQUEST_TIMEOUT_S,
        )
    except requests.RequestException as error:
        raise ServerProblem(_describe_no_answer(api_url, error, variable="PREFECT_API_URL")) from None
    fix = "set PREFECT_API_AUTH_STRING to user:password"
    return _parse_json(_require_success(response, address=f"{api_url}{path}", fix=fix), address=api_url)


def _request_mlflow(uri: str, path: str) -> requests.Response:
    """Return the answer of MLflow's server to a request with the credentials that MLflow uses."""
    try:
        response = http_request(get_default_host_creds(uri), path, "GET", max_retries=0, timeout=REQUEST_TIMEOUT_S)
    except Exception as error:  # MLflow wraps the errors of requests
        raise ServerProblem(_describe_no_answer(uri, error, variable="MLFLOW_TRACKING_URI")) from None
    fix = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    return _require_success(response, address=f"{uri}{path}", fix=fix)


def _check_mlflow_database(database_uri: str) -> Finding:
    database_url = make_url(database_uri)
    if database_url.get_backend_name() == "sqlite" and not os.path.exists(database_url.database or ""):  # noqa: PTH110
        return not_used(f"embedded: the first run creates {database_url.database}")
    try:
        with create_engine(database_url).connect() as connection:
            revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
    except (SQLAlchemyError, ModuleNotFoundError) as error:
        root_cause = str(getattr(error, "orig", error)).splitlines()[0]
        return problem(f"{database_uri}: {root_cause}; check MLFLOW_TRACKING_URI, and that the extra `servers` is installed")
    return ok(f"{redacted(database_uri)}, schema {revision}")


def _describe_no_answer(address: str, error: Exception, *, variable: str) -> str:
    reason = "no answer in time" if "timed out" in str(error).lower() else "connection refused or reset"
    if "resolve" in str(error):
        reason = "its host name is unknown"
    return f"{address}: {reason}; start the server, or correct {variable}"


def _require_success(response: requests.Response, *, address: str, fix: str) -> requests.Response:
    if response.status_code in (401, 403):
        raise ServerProblem(f"{address}: access denied (status {response.status_code}); {fix}")
    if not response.ok:
        raise ServerProblem(
            f"{address}: status {response.status_code}; check that this is the address of the API, and "
            "read the log of the server"
        )
    return response


def _parse_json(response: requests.Response, *, address: str) -> Any:
    try:
        return response.json() if response.content else None
    except ValueError:
        raise ServerProblem(f"{address}: the answer is not from Prefect's API; PREFECT_API_URL must end in /api") from None


def _has_prefect_credentials() -> bool:
    return bool(os.environ.get("PREFECT_API_AUTH_STRING") or os.environ.get("PREFECT_API_KEY"))


def _answers_without_credentials(url: str) -> bool:
    """Return whether the server accepts a request without credentials."""
    session = requests.Session()
    session.trust_env = False  # no credentials of ~/.netrc, and no proxy
    try:
        return session.get(url, timeout=REQUEST_TIMEOUT_S).ok
    except requests.RequestException:
        return False


def _check_server_version(package: str, server_version: str, *, address: str, is_open: bool, fix: str) -> Finding:
    """Compare the version of a server with that of the installed package; report a server that has no password.

    Args:
        fix: variable or command that protects the server with a password, for the message.
    """
    installed_version = metadata.version(package)
    server_text = f"{redacted(address)}, version {server_version}"
    if _major_version(server_version) != _major_version(installed_version):
        return problem(
            f"{server_text}, but this machine has {package} {installed_version}; install the same major version on both"
        )
    if _version_numbers(server_version) < _version_numbers(installed_version)[:2]:
        return problem(f"{server_text} is older than {package} {installed_version} of this machine; update the server first")
    host = urlsplit(address).hostname
    if is_open and host not in LOOPBACK_HOSTS:
        return problem(f"{server_text} has no password: whoever reaches it can run code on the workers; set {fix}")
    return ok(server_text + ("" if is_open else ", with password"))


def _major_version(version: str) -> str:
    return version.partition(".")[0]


def _version_numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, e.g. (3, 9) for 3.9.1rc2."""
    numbers: list[int] = []
    for number_text in version.split("."):
        if not number_text.isdigit():
            break
        numbers.append(int(number_text))
    return tuple(numbers)
