"""Checks of the Prefect server, the MLflow server and the schedule for `nightjar doctor FILE`, without retries."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import httpx
import requests
from filelock import FileLock, Timeout
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.objects import DeploymentStatus
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from flows.settings.pipeline import PipelineConfig
from recsys_core.errors import first_line, redacted
from tasks.registry.mlflow_client import tracking_error, tracking_uri
from tasks.runs.workspace import UP_LOCK_NAME

REQUEST_TIMEOUT_S = 4.0
MAX_LATENESS_S = 300.0
"""A planned run counts as late if it has not started this long after its planned start."""
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_PREFECT_ERRORS = (httpx.HTTPError, ValueError)  # ValueError: the answer is not JSON
_MLFLOW_SEARCH_PATH = "/api/2.0/mlflow/registered-models/search?max_results=1"

Status = Literal["ok", "problem", "not used"]


class Finding(NamedTuple):
    """Result of one check. The text of a problem ends with the fix."""

    status: Status
    text: str


def ok(text: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding("ok", text)


def problem(text: str) -> Finding:
    """Return the finding of a check that failed. `text` names the place, the values and the fix. Passwords are hidden."""
    return Finding("problem", redacted(text))


def not_used(text: str) -> Finding:
    """Return the finding of a check that does not apply to this installation."""
    return Finding("not used", text)


def check_prefect() -> Finding:
    """Check that the server of PREFECT_API_URL answers, has a password and a compatible version."""
    api_url = os.environ.get("PREFECT_API_URL")
    if not api_url:
        return not_used("embedded: every command starts its own server; set PREFECT_API_URL to use a running one")
    try:
        with _prefect_client() as client:
            server_version = client.api_version()
    except _PREFECT_ERRORS as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403):
            return _access_denied(api_url, error.response.status_code, fix="set PREFECT_API_AUTH_STRING to user:password")
        return problem(
            f"{api_url}: {first_line(error)}; check the server, and that PREFECT_API_URL is its address and ends in /api"
        )
    has_password = not _answers_without_credentials(f"{api_url.rstrip('/')}/admin/version")
    fix = "PREFECT_SERVER_API_AUTH_STRING"
    return _check_server("prefect", server_version, address=api_url, has_password=has_password, fix=fix)


def check_mlflow(config: PipelineConfig) -> Finding:
    """Check that the server of MLFLOW_TRACKING_URI answers, has a password and a compatible version.

    Without a server, check that the database can be opened.
    """
    uri = tracking_uri(config.workspace)
    if not uri.startswith(("http://", "https://")):
        return _check_mlflow_database(uri)
    try:
        version_response, search_response = (
            http_request(get_default_host_creds(uri), path, "GET", max_retries=0, timeout=REQUEST_TIMEOUT_S)
            for path in ("/version", _MLFLOW_SEARCH_PATH)
        )
        if search_response.status_code in (401, 403):
            fix = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            return _access_denied(uri, search_response.status_code, fix=fix)
        for response in (version_response, search_response):
            response.raise_for_status()
    except Exception as error:  # MLflow wraps the errors of requests
        return problem(str(tracking_error(error, uri=uri)))
    has_password = not _answers_without_credentials(uri.rstrip("/") + _MLFLOW_SEARCH_PATH)
    fix = "`mlflow server --app-name basic-auth`"
    return _check_server("mlflow", version_response.text.strip(), address=uri, has_password=has_password, fix=fix)


def _check_mlflow_database(database_uri: str) -> Finding:
    try:
        database_url = make_url(database_uri)
        if database_url.get_backend_name() == "sqlite" and not os.path.exists(database_url.database or ""):  # noqa: PTH110
            return not_used(f"embedded: the first run creates {database_url.database}")
        with create_engine(database_url).connect() as connection:
            revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
    except (SQLAlchemyError, ModuleNotFoundError, ValueError) as error:  # ValueError: the port is not a number
        root_cause = first_line(getattr(error, "orig", None) or error)
        return problem(f"{database_uri}: {root_cause}; check MLFLOW_TRACKING_URI, and that the extra `servers` is installed")
    return ok(f"{redacted(database_uri)}, schema {revision}")


def check_schedule(config: PipelineConfig) -> Finding:
    """Check that `nightjar up`, or a deployment on the server of PREFECT_API_URL, starts the planned runs."""
    if not os.environ.get("PREFECT_API_URL"):
        return _check_up_is_running(config)
    try:
        with _prefect_client() as client:
            return _check_deployment(client, config)
    except _PREFECT_ERRORS:
        return not_used("unknown, because the Prefect server does not answer")


def _check_up_is_running(config: PipelineConfig) -> Finding:
    """Check that `nightjar up`, which holds a lock of the workspace, is running."""
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


def _check_deployment(client: SyncPrefectClient, config: PipelineConfig) -> Finding:
    """Check the deployment of the pipeline: its schedule, the process that starts its runs, and its next run."""
    try:
        deployment = client.read_deployment_by_name(f"nightly-retrain/{config.name}")
    except ObjectNotFound:
        return problem(f"the server has no deployment of pipeline {config.name}; create it with `nightjar deploy`")
    deployment_text = f"deployment {deployment.name}"
    cron_schedules = [
        (f"{entry.schedule.cron} {entry.schedule.timezone or 'UTC'}", entry.active)
        for entry in deployment.schedules
        if isinstance(entry.schedule, CronSchedule)
    ]
    deployed_text = ", ".join(text for text, _ in cron_schedules) or "none"
    config_text = f"{config.schedule.cron} {config.schedule.timezone}" if config.schedule.cron else "none"
    if deployed_text != config_text:
        return problem(
            f"{deployment_text} has the schedule {deployed_text}, but the config has {config_text} (schedule.cron and "
            "schedule.timezone); apply the config with `nightjar deploy`"
        )
    if deployment.status != DeploymentStatus.READY:
        pool_name = deployment.work_pool_name
        fix = "`nightjar up`" if pool_name is None else f"a worker: prefect worker start --pool {pool_name}"
        return problem(f"no process starts the runs of {deployment_text}; start {fix}")
    if not cron_schedules:
        return not_used(f"{deployment_text} has no schedule: runs are started by hand only")
    if deployment.paused or not all(is_active for _, is_active in cron_schedules):
        return problem(
            f"{deployment_text} or its schedule {deployed_text} is paused; resume it on the deployment page in Prefect"
        )
    return _check_next_run(client, deployment, deployment_text=deployment_text)


def _check_next_run(client: SyncPrefectClient, deployment: DeploymentResponse, *, deployment_text: str) -> Finding:
    next_runs = client.read_flow_runs(
        deployment_filter=DeploymentFilter.model_validate({"id": {"any_": [deployment.id]}}),
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": ["SCHEDULED"]}}}),
        sort=FlowRunSort.NEXT_SCHEDULED_START_TIME_ASC,
        limit=1,
    )
    planned_start = next_runs[0].next_scheduled_start_time if next_runs else None
    if planned_start is None:
        return problem(
            f"{deployment_text} has an active schedule but no planned run; check that the server runs its scheduler service"
        )
    next_run_text = f"{deployment_text}: next run at {planned_start.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    if (datetime.now(UTC) - planned_start).total_seconds() > MAX_LATENESS_S:
        return problem(
            f"{next_run_text}, which is late; check the workers, the work pool and the concurrency limit of the deployment"
        )
    return ok(next_run_text)


@contextmanager
def _prefect_client() -> Iterator[SyncPrefectClient]:
    """Yield a client of the server in PREFECT_API_URL with the credentials of the environment."""
    with SyncPrefectClient(
        os.environ["PREFECT_API_URL"],
        auth_string=os.environ.get("PREFECT_API_AUTH_STRING"),
        api_key=os.environ.get("PREFECT_API_KEY"),
        httpx_settings={"timeout": REQUEST_TIMEOUT_S},
    ) as client:
        yield client


def _answers_without_credentials(url: str) -> bool:
    """Return whether the server accepts a request without credentials."""
    session = requests.Session()
    session.trust_env = False  # use neither credentials from ~/.netrc nor a proxy
    try:
        return session.get(url, timeout=REQUEST_TIMEOUT_S).ok
    except requests.RequestException:
        return False


def _access_denied(address: str, http_status: int, *, fix: str) -> Finding:
    return problem(f"{address}: access denied (status {http_status}); {fix}")


def _check_server(package: str, server_version: str, *, address: str, has_password: bool, fix: str) -> Finding:
    """Compare the versions of a server and of the installed package; report a server that has no password.

    Args:
        fix: variable or command that protects the server with a password, for the message.
    """
    installed_version = metadata.version(package)
    server_text = f"{redacted(address)}, version {server_version}"
    server_version_parts, installed_version_parts = (version.split(".")[:2] for version in (server_version, installed_version))
    if server_version_parts[0] != installed_version_parts[0] or (
        list(map(int, server_version_parts)) < list(map(int, installed_version_parts))
    ):
        return problem(
            f"{server_text}, but this machine has {package} {installed_version}; the server needs the same major version and "
            "must not be older: update the server first"
        )
    if not has_password and urlsplit(address).hostname not in LOOPBACK_HOSTS:
        return problem(f"{server_text} has no password: whoever reaches it can run code on the workers; set {fix}")
    return ok(server_text + (", with password" if has_password else ""))
